//! What makes a machine unlike its siblings: entropy, clock, names, ids.
//!
//! Owns setting them. Until a reseed that is due, nothing here reads randomness.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::fd::AsRawFd;
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

/// Takes names and ids.
pub fn set(identity: &Identity) -> Answer {
    if let Some(name) = &identity.hostname {
        let set = rustix::system::sethostname(name.as_bytes()).map_err(io::Error::from);
        let set = set.and_then(|()| write_in_etc("hostname", &format!("{name}\n"))).and_then(|()| write_hosts(name));
        if let Err(e) = set {
            return refused("setting the host name", &e);
        }
    }
    if let Some(id) = &identity.machine_id
        && let Err(e) = write_in_etc("machine-id", &format!("{}\n", hex(&id[..])))
    {
        return refused("writing /etc/machine-id", &e);
    }
    if let Some(id) = &identity.boot_id
        && let Err(e) = set_boot_id(&**id)
    {
        return refused("setting the boot id", &e);
    }
    Answer::Done
}

fn write_in_etc(name: &str, text: &str) -> io::Result<()> {
    fs::create_dir_all("/etc")?;
    fs::write(Path::new("/etc").join(name), text)
}

/// The machine's own names have addresses, as they have everywhere: an image brings no such file, or an empty one. What it brings else stays.
fn write_hosts(name: &str) -> io::Result<()> {
    let file = Path::new("/etc/hosts");
    let there = fs::read_to_string(file).unwrap_or_default();
    let names = |wanted: &str| {
        there.lines().any(|line| !line.trim_start().starts_with('#') && line.split_whitespace().skip(1).any(|word| word == wanted))
    };
    let mut text = there.clone();
    if !text.is_empty() && !text.ends_with('\n') {
        text.push('\n');
    }
    if !names("localhost") {
        text.push_str("127.0.0.1\tlocalhost\n::1\tlocalhost\n");
    }
    if !names(name) {
        text.push_str(&format!("127.0.1.1\t{name}\n"));
    }
    if text == there { Ok(()) } else { write_in_etc("hosts", &text) }
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
    use std::fmt::Write;
    bytes.iter().fold(String::new(), |mut text, byte| {
        // Writing to a String can't fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}
