//! Everybody else's clients: libnbd's and QEMU's.

use std::path::Path;
use std::process::{Command, Output};
use std::sync::Arc;

use volley_volume::serve::socket::Socket;

use crate::device::FileDevice;
use crate::process::place;
use crate::{have, patterns};

const MIB: u64 = 1 << 20;

fn run(program: &str, args: &[&str]) -> Output {
    let output = Command::new(program).args(args).output().unwrap();
    assert!(
        output.status.success(),
        "{program} {args:?}: {}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    output
}

fn said(program: &str, args: &[&str]) -> String {
    String::from_utf8(run(program, args).stdout).unwrap()
}

fn served(dir: &Path, device: FileDevice) -> (Arc<FileDevice>, Socket, String) {
    let device = Arc::new(device);
    let socket = Socket::open(&place(dir, "s"), device.clone()).unwrap();
    let uri = format!("nbd+unix:///?socket={}", socket.path().display());
    (device, socket, uri)
}

#[test]
fn nbdinfo_is_told_what_is_served() {
    if !have(&["nbdinfo"]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (_device, _socket, uri) = served(dir.path(), FileDevice::new(10 * MIB + 512));
    let info = said("nbdinfo", &["--list", &uri]);
    for line in [
        "newstyle-fixed without TLS, using structured packets",
        "export=\"disk\"",
        "export-size: 10486272",
        "base:allocation",
        "can_df: true",
        "can_fast_zero: false",
        "can_flush: true",
        "can_fua: true",
        "can_multi_conn: false",
        "can_trim: true",
        "can_zero: true",
        "is_read_only: false",
        "block_size_minimum: 1",
        "block_size_preferred: 4096",
        "block_size_maximum: 33554432",
    ] {
        assert!(info.contains(line), "{line} is not in {info}");
    }
    assert_eq!(info.matches("export=").count(), 1);
    let (_device, _socket, uri) = {
        let dir = dir.path().join("ro");
        std::fs::create_dir(&dir).unwrap();
        served(&dir, FileDevice::read_only(MIB))
    };
    run("nbdinfo", &["--is", "read-only", &uri]);
}

#[test]
fn nbdcopy_copies_both_ways() {
    if !have(&["nbdcopy", "nbdinfo"]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (device, _socket, uri) = served(dir.path(), FileDevice::new(40 * MIB));
    let source = dir.path().join("source");
    let mut bytes = vec![0; 40 * MIB as usize];
    bytes[MIB as usize..20 * MIB as usize].copy_from_slice(&patterns(MIB, 19 * MIB as usize, 9));
    bytes[39 * MIB as usize + 77..].copy_from_slice(&patterns(0, MIB as usize - 77, 4));
    std::fs::write(&source, &bytes).unwrap();
    run("nbdcopy", &["--flush", source.to_str().unwrap(), &uri]);
    assert!(device.bytes(0, bytes.len()) == bytes);
    let copy = dir.path().join("copy");
    run("nbdcopy", &[&uri, copy.to_str().unwrap()]);
    assert!(std::fs::read(copy).unwrap() == bytes);
    // Zeros were not kept, and are told of.
    let map = said("nbdinfo", &["--map", "--totals", &uri]);
    assert!(map.contains("hole,zero"), "{map}");
}

#[test]
fn nbdsh_asks_odd_things() {
    if !have(&["nbdsh"]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (device, _socket, uri) = served(dir.path(), FileDevice::new(MIB + 3));
    let script = r#"
import os
def fails(what, number):
    try:
        what()
    except nbd.Error as e:
        assert e.errno == number, (e.errno, number)
    else:
        raise AssertionError("that should fail")
h.set_strict_mode(0)
size = h.get_size()
assert size == 1048579, size
for offset, length in [(0, 1), (511, 2), (4095, 4098), (12345, 54321), (size - 1, 1), (1, 1048577)]:
    data = os.urandom(length)
    h.pwrite(data, offset)
    assert h.pread(length, offset) == data
    assert h.pread_structured(length, offset, lambda *a: 0, nbd.CMD_FLAG_DF) == data
h.pwrite(b"x" * 9000, 100, nbd.CMD_FLAG_FUA)
h.zero(777, 3333)
assert h.pread(9000, 100) == b"x" * 3233 + b"\0" * 777 + b"x" * 4990
h.zero(5, 200, nbd.CMD_FLAG_NO_HOLE | nbd.CMD_FLAG_FUA)
h.trim(4096, 4096)
assert h.pread(4096, 4096) == b"\0" * 4096
h.flush()
fails(lambda: h.pread(2, size - 1), "EINVAL")
fails(lambda: h.pwrite(b"ab", size - 1), "ENOSPC")
fails(lambda: h.zero(2, size - 1), "ENOSPC")
fails(lambda: h.trim(2, size - 1), "EINVAL")
fails(lambda: h.zero(4096, 0, nbd.CMD_FLAG_FAST_ZERO), "EINVAL")
fails(lambda: h.cache(1, 0), "EINVAL")
told = []
h.block_status(size, 0, lambda context, offset, entries, error: told.append((context, offset, entries)))
assert told[0][0] == "base:allocation" and sum(told[0][2][0::2]) == size, told
one = []
h.block_status(size, 0, lambda context, offset, entries, error: one.append(entries), nbd.CMD_FLAG_REQ_ONE)
assert len(one[0]) == 2, one
# Many at once, of all sizes, replied to in any order.
data = os.urandom(size)
cookies, at = [], 0
while at < size:
    length = min(1 + (at * 7919) % 40000, size - at)
    cookies.append(h.aio_pwrite(nbd.Buffer.from_bytearray(bytearray(data[at:at + length])), at))
    at += length
while cookies:
    cookies = [c for c in cookies if not h.aio_command_completed(c)]
    if cookies: h.poll(-1)
assert h.pread(size, 0) == data
open(os.environ["OUT"], "wb").write(data)
"#;
    let out = dir.path().join("out");
    let mut command = Command::new("nbdsh");
    command.args(["--base-allocation", "-u", &uri, "-c", script]);
    // It runs the first Python there is; its module is with Debian's.
    let output = command.env("PATH", "/usr/bin:/bin").env("OUT", &out).output().unwrap();
    assert!(output.status.success(), "{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(device.bytes(0, MIB as usize + 3) == std::fs::read(out).unwrap());
}

#[test]
fn qemu_reads_what_it_wrote() {
    if !have(&["qemu-img", "qemu-io"]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (device, socket, uri) = served(dir.path(), FileDevice::new(32 * MIB));
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let mut bytes = vec![0; 32 * MIB as usize];
    bytes[..5 * MIB as usize].copy_from_slice(&patterns(0, 5 * MIB as usize, 1));
    bytes[30 * MIB as usize..].copy_from_slice(&patterns(7, 2 * MIB as usize, 2));
    std::fs::write(path("raw"), &bytes).unwrap();
    run("qemu-img", &["convert", "-n", "-f", "raw", "-O", "raw", &path("raw"), &uri]);
    assert!(device.bytes(0, bytes.len()) == bytes);
    assert!(said("qemu-img", &["compare", "-f", "raw", "-F", "raw", &path("raw"), &uri]).contains("identical"));
    let map = said("qemu-img", &["map", "--output=json", "-f", "raw", &uri]);
    assert!(map.contains(r#""zero": true, "data": false"#) && map.contains(r#""zero": false, "data": true"#), "{map}");
    run("qemu-img", &["convert", "-f", "raw", "-O", "qcow2", &uri, &path("qcow2")]);
    assert!(said("qemu-img", &["compare", "-f", "qcow2", "-F", "raw", &path("qcow2"), &uri]).contains("identical"));
    let io = "write -P 0xab 12345 70000;write -f -P 0xcd 1M 64k;write -z 4M 1M;write -z -u 3M 100k;discard 31M 1M;flush;\
              read -P 0xab 12345 70000;read -P 0xcd 1M 64k;read -P 0 4M 1M;read -P 0 3M 100k;read -P 0 31M 1M;aio_write -P 7 8M 3M;aio_write -P 8 12M 3M;aio_flush;\
              read -P 7 8M 3M;read -P 8 12M 3M";
    let mut args = vec!["-f", "raw", &uri];
    args.extend(io.split(';').flat_map(|command| ["-c", command.trim()]));
    let told = said("qemu-io", &args);
    assert!(!told.contains("failed") && !told.contains("error"), "{told}");
    assert!(device.bytes(12_345, 70_000) == vec![0xab; 70_000] && device.bytes(12 * MIB, 3 << 20) == vec![8; 3 << 20]);
    for write in [&[][..], &["-w"], &["-w", "--flush-interval=64"]] {
        let mut args = vec!["bench", "-f", "raw", "-c", "2000", "-d", "16", "-s", "4096", "-S", "69632"];
        args.extend(write);
        args.push(&uri);
        run("qemu-img", &args);
    }
    socket.detach();
}
