//! A real kernel mounts a disk: Debian's, in QEMU.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use volley_worker::image::{Source, Store};

use super::guest::{Guest, Host};
use super::{imported, odd_files, program, sha256};

/// What the file system needs, in this order, and what makes a disk of a file.
const MODULES: [&str; 3] = ["kernel/lib/libcrc32c.ko", "kernel/fs/erofs/erofs.ko", "kernel/drivers/block/loop.ko"];
/// Ten times as long as it takes.
const TIME_MAX: Duration = Duration::from_secs(120);

/// CAP_NET_RAW, in force from the start: version 2 of `struct vfs_cap_data` in Linux's `uapi/linux/capability.h`.
const MAY_SEND_RAW: [u8; 20] = [1, 0, 0, 2, 0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

const SCRIPT: &str = "
for m in libcrc32c erofs loop; do insmod /$m.ko; done
mkdir /root
mount -t erofs -o ro,loop /root.erofs /root && echo @mounted
cd /root
echo @names $(find . -print0 | sort -z | sha256sum)
echo @bytes $(find . -type f -print0 | sort -z | xargs -0 cat | sha256sum)
echo @busybox $(stat -c %a:%h:%u bin/busybox)
echo @link $(readlink l3000 | wc -c)
cat bin/ls | cmp - bin/busybox && echo @same
chroot /root /bin/busybox echo @ran
su nobody -c 'echo @capable $(/root/bin/busybox-capable grep CapEff /proc/self/status)'
touch new || echo @read-only
";

/// The kernel's modules, unpacked by deploy/setup.sh.
fn modules() -> Option<PathBuf> {
    let cache = || {
        Some(PathBuf::from(
            std::env::var_os("XDG_CACHE_HOME").unwrap_or(OsString::from(Path::new(&std::env::var_os("HOME")?).join(".cache"))),
        ))
    };
    let dir = std::env::var_os("VOLLEY_GUEST_MODULES").map(PathBuf::from).or_else(|| Some(cache()?.join("volley/guest/modules")))?;
    MODULES.iter().all(|module| dir.join(module).is_file()).then_some(dir)
}

/// Every path below `root`, as `find .` names them, in the order of their bytes.
fn paths(root: &Path) -> Vec<PathBuf> {
    let mut found = super::listed(root)
        .into_keys()
        .map(|path| if path == Path::new("") { PathBuf::from(".") } else { Path::new(".").join(path) })
        .collect::<Vec<_>>();
    found.sort_by(|a, b| a.as_os_str().as_bytes().cmp(b.as_os_str().as_bytes()));
    found
}

#[tokio::test]
async fn a_kernel_mounts_the_disk_and_runs_what_is_in_it() {
    let (host, modules) = match (Host::find(), modules()) {
        (Ok(host), Some(modules)) => (host, modules),
        (Err(why), _) => {
            eprintln!("skipped: {why}");
            return;
        }
        (_, None) => {
            eprintln!("skipped: no modules of the guest kernel (VOLLEY_GUEST_MODULES)");
            return;
        }
    };
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("root");
    odd_files(&root);
    std::fs::create_dir(root.join("bin")).unwrap();
    std::fs::copy(program("busybox").unwrap(), root.join("bin/busybox")).unwrap();
    std::fs::set_permissions(root.join("bin/busybox"), PermissionsExt::from_mode(0o4755)).unwrap();
    std::fs::hard_link(root.join("bin/busybox"), root.join("bin/ls")).unwrap();
    // A capability of a program, which only root may give it.
    std::fs::copy(program("busybox").unwrap(), root.join("bin/busybox-capable")).unwrap();
    let given =
        rustix::fs::setxattr(root.join("bin/busybox-capable"), "security.capability", &MAY_SEND_RAW, rustix::fs::XattrFlags::empty());
    let capable = given.map_or("0000000000000000", |()| "0000000000002000");
    let store = Store::open(&dir.path().join("images")).unwrap();
    let note = imported(&store, Source::Directory(root.clone())).await;

    let mut guest = Guest::new(host, "");
    guest.file("/root.erofs", &std::fs::read(store.root(&note.root)).unwrap(), 0o444);
    for module in MODULES {
        let name = Path::new(module).file_name().unwrap().to_str().unwrap();
        guest.file(&format!("/{name}"), &std::fs::read(modules.join(module)).unwrap(), 0o644);
    }
    let console = guest.run(SCRIPT, TIME_MAX);

    let names: Vec<u8> = paths(&root).iter().flat_map(|path| [path.as_os_str().as_bytes(), b"\0"].concat()).collect();
    let files = paths(&root).into_iter().filter(|path| std::fs::symlink_metadata(root.join(path)).unwrap().is_file());
    let bytes: Vec<u8> = files.flat_map(|path| std::fs::read(root.join(path)).unwrap()).collect();
    let owner = std::os::unix::fs::MetadataExt::uid(&std::fs::metadata(&root).unwrap());
    let want = [
        "@mounted".to_owned(),
        format!("@names {} -", sha256(&names)),
        format!("@bytes {} -", sha256(&bytes)),
        format!("@busybox 4755:2:{owner}"),
        "@link 3001".to_owned(),
        "@same".to_owned(),
        "@ran".to_owned(),
        format!("@capable CapEff: {capable}"),
        "@read-only".to_owned(),
    ];
    let said: Vec<&str> = console.text.lines().filter(|line| line.starts_with('@')).collect();
    assert_eq!(said, want, "{}", console.text);
    assert!(console.off, "the guest did not end within {TIME_MAX:?}");
}
