//! What makes a machine unlike its siblings: entropy, clock, names, ids.
//!
//! Owns setting them. Until a reseed that is due, nothing here reads randomness.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use volley_jobspecs::wire::guest::{Answer, Identity, SEED_BYTES};

use super::session::refused;

/// `_IOW('R', 3, int[2])` and `_IO('R', 7)` of linux/random.h.
const RNDADDENTROPY: libc::c_ulong = 0x4008_5203;
const RNDRESEEDCRNG: libc::c_ulong = 0x5207;
/// The kernel's boot id.
pub const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
/// Where files lie that stand for others.
const OWN_DIR: &str = "/run/volley";

/// Largest file of /etc that is read: some lists of names to block have half of that.
const ETC_BYTES_MAX: u64 = 8 << 20;

/// What `RNDADDENTROPY` takes: credited bits, bytes, the bytes.
#[repr(C)]
struct PoolInfo {
    entropy_count: libc::c_int,
    buf_size: libc::c_int,
    buf: [u8; SEED_BYTES],
}

/// Mixes the seed in, credits it, and lets the generator begin anew. Adding alone leaves clones alike: the kernel draws from what it added
/// only at its next reseed, minutes later. The hash of what it gives then: two machines with one hash are one.
///
/// # Errors
/// What the system says.
pub fn reseed(seed: &[u8; SEED_BYTES]) -> io::Result<[u8; 32]> {
    let random = OpenOptions::new().read(true).write(true).open("/dev/urandom")?;
    let bytes = libc::c_int::try_from(SEED_BYTES).unwrap_or_default();
    let info = PoolInfo { entropy_count: bytes * 8, buf_size: bytes, buf: *seed };
    // SAFETY: the request reads a `rand_pool_info`, which `info` is; it lives over the call.
    check(unsafe { libc::ioctl(random.as_raw_fd(), RNDADDENTROPY, &raw const info) })?;
    // SAFETY: the request takes no argument.
    check(unsafe { libc::ioctl(random.as_raw_fd(), RNDRESEEDCRNG, 0) })?;
    let mut drawn = [0; 64];
    File::open("/dev/urandom")?.read_exact(&mut drawn)?;
    Ok(*blake3::hash(&drawn).as_bytes())
}

/// Sets the wall clock. What it said before, in nanoseconds since the Unix epoch.
///
/// # Errors
/// What the system says.
pub fn set_clock(unix_ns: u64) -> io::Result<u64> {
    let before = now();
    let seconds = libc::time_t::try_from(unix_ns / 1_000_000_000).map_err(io::Error::other)?;
    let time = libc::timespec { tv_sec: seconds, tv_nsec: libc::c_long::try_from(unix_ns % 1_000_000_000).map_err(io::Error::other)? };
    // SAFETY: `time` lives over the call.
    check(unsafe { libc::clock_settime(libc::CLOCK_REALTIME, &raw const time) })?;
    Ok(before)
}

/// The wall clock, in nanoseconds since the Unix epoch.
pub fn now() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call fills `time`. It can't fail for this clock.
    unsafe { libc::clock_gettime(libc::CLOCK_REALTIME, &raw mut time) };
    u64::try_from(time.tv_sec).unwrap_or_default().saturating_mul(1_000_000_000) + u64::try_from(time.tv_nsec).unwrap_or_default()
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Takes names and ids. What an image or a warm-up has made of /etc is theirs: a file that can't be written there keeps nothing from beginning.
pub fn set(identity: &Identity) -> Answer {
    if let Some(name) = &identity.hostname {
        if let Err(e) = rustix::system::sethostname(name.as_bytes()) {
            return refused("setting the host name", &e.into());
        }
        told("hostname", write_in_etc("hostname", &format!("{name}\n")));
        told("hosts", write_hosts(name));
    }
    if let Some(id) = &identity.machine_id {
        told("machine-id", write_in_etc("machine-id", &format!("{}\n", hex(&id[..]))));
    }
    if let Some(id) = &identity.boot_id
        && let Err(e) = set_boot_id(&**id)
    {
        return refused("setting the boot id", &e);
    }
    Answer::Done
}

/// On the console, for whoever wonders.
fn told(name: &str, written: io::Result<()>) {
    if let Err(e) = written {
        eprintln!("volley-guest: /etc/{name} is left as it is: {e}");
    }
}

fn write_in_etc(name: &str, text: &str) -> io::Result<()> {
    fs::create_dir_all("/etc")?;
    write_plain(&Path::new("/etc").join(name), text)
}

/// Writes a plain file; anything else of that name is an error, and never waited for.
fn write_plain(path: &Path, text: &str) -> io::Result<()> {
    // Not before it is known what it is.
    let mut file = plain(OpenOptions::new().write(true).create(true).truncate(false).custom_flags(libc::O_NONBLOCK), path)?;
    file.set_len(0)?;
    file.write_all(text.as_bytes())
}

/// Reads a plain file; nothing of one that is too large.
pub fn read_plain(path: &Path) -> io::Result<String> {
    let file = plain(OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK), path)?;
    let mut text = String::new();
    match file.take(ETC_BYTES_MAX + 1).read_to_string(&mut text)? as u64 {
        0..=ETC_BYTES_MAX => Ok(text),
        _ => Err(io::ErrorKind::FileTooLarge.into()),
    }
}

fn plain(how: &OpenOptions, path: &Path) -> io::Result<File> {
    let file = how.open(path)?;
    if file.metadata()?.is_file() { Ok(file) } else { Err(io::Error::other("it is no plain file")) }
}

/// The machine's own names have addresses, as they have everywhere: an image brings no such file, or an empty one. What it brings else stays.
fn write_hosts(name: &str) -> io::Result<()> {
    let file = Path::new("/etc/hosts");
    let there = match read_plain(file) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => String::new(),
        there => there?,
    };
    let text = with_names(&there, name);
    if text == there { Ok(()) } else { write_in_etc("hosts", &text) }
}

/// The file with the names that it lacks.
fn with_names(there: &str, name: &str) -> String {
    let names = |wanted: &str| {
        there.lines().any(|line| !line.trim_start().starts_with('#') && line.split_whitespace().skip(1).any(|word| word == wanted))
    };
    let mut text = there.to_owned();
    if !text.is_empty() && !text.ends_with('\n') {
        text.push('\n');
    }
    if !names("localhost") {
        text.push_str("127.0.0.1\tlocalhost\n::1\tlocalhost\n");
    }
    if !names(name) {
        text.push_str(&format!("127.0.1.1\t{name}\n"));
    }
    text
}

/// The kernel draws its boot id once and has no way to change it, so another file is put in its place.
fn set_boot_id(id: &[u8]) -> io::Result<()> {
    fs::create_dir_all(OWN_DIR)?;
    let hex = hex(id);
    let part = |from: usize, to: usize| hex.get(from..to).unwrap_or_default().to_owned();
    let parts = [part(0, 8), part(8, 12), part(12, 16), part(16, 20), part(20, 32)];
    let file = Path::new(OWN_DIR).join("boot_id");
    fs::write(&file, format!("{}\n", parts.join("-")))?;
    let mounted = fs::read_to_string("/proc/self/mounts").is_ok_and(|mounts| mounts.contains(BOOT_ID));
    if !mounted {
        rustix::mount::mount_bind(&file, BOOT_ID)?;
    }
    Ok(())
}

fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::new(), |mut text, byte| {
        // Writing to a String can't fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_are_there_are_not_said_again() {
        assert_eq!(with_names("", "m"), "127.0.0.1\tlocalhost\n::1\tlocalhost\n127.0.1.1\tm\n");
        assert_eq!(with_names("127.0.0.1 localhost m", "m"), "127.0.0.1 localhost m\n");
        assert!(with_names("# localhost\n", "m").contains("\n127.0.0.1\tlocalhost\n"));
    }

    #[test]
    fn what_is_no_plain_file_is_neither_written_nor_waited_for() {
        let dir = std::env::temp_dir().join(format!("volley-identity-{}", std::process::id()));
        fs::create_dir(&dir).unwrap();
        let path = |name: &str| dir.join(name);
        rustix::fs::mknodat(rustix::fs::CWD, path("fifo"), rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0).unwrap();
        fs::create_dir(path("dir")).unwrap();
        std::os::unix::fs::symlink("/nowhere/file", path("dangling")).unwrap();
        std::os::unix::fs::symlink("/dev/zero", path("device")).unwrap();
        for name in ["fifo", "dir", "dangling", "device"] {
            assert!(write_plain(&path(name), "x").is_err(), "{name}");
            assert!(read_plain(&path(name)).is_err(), "{name}");
        }
        fs::write(path("large"), vec![b'x'; ETC_BYTES_MAX as usize + 1]).unwrap();
        assert!(read_plain(&path("large")).is_err());
        write_plain(&path("large"), "y").unwrap();
        assert_eq!(read_plain(&path("large")).unwrap(), "y");
        fs::remove_dir_all(&dir).unwrap();
    }
}
