//! Who may connect, and when.

use std::io::Read;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use volley_volume::serve::nbd::wire::command;
use volley_volume::serve::socket::{Place, Socket, SocketError};

use crate::client::Client;
use crate::device::FileDevice;
use crate::process::place;
use crate::{have, is_root, soon};

/// Is somebody who connects sent away before anything is said?
fn is_refused(path: &Path) -> bool {
    let mut byte = [0];
    // A reset is one too.
    UnixStream::connect(path).unwrap().read(&mut byte).unwrap_or(0) == 0
}

fn open(place: &Place) -> (Arc<FileDevice>, Socket) {
    let device = Arc::new(FileDevice::new(1 << 20));
    (Arc::clone(&device), Socket::open(place, device).unwrap())
}

#[test]
fn a_socket_is_its_owners_alone() {
    let dir = tempfile::tempdir().unwrap();
    let mut place = place(dir.path(), "a");
    if is_root() {
        (place.owner, place.group) = (4321, 4322);
    }
    let (_device, socket) = open(&place);
    let file = std::fs::symlink_metadata(socket.path()).unwrap();
    assert!(file.file_type().is_socket());
    assert_eq!((file.mode() & 0o7777, file.uid(), file.gid()), (0o600, place.owner, place.group));
}

#[test]
fn one_client_at_a_time_and_the_next_when_it_has_left() {
    let dir = tempfile::tempdir().unwrap();
    let (_device, socket) = open(&place(dir.path(), "a"));
    for _ in 0..20 {
        let mut first = Client::connect(socket.path(), true);
        assert!(is_refused(socket.path()) && socket.has_client());
        assert_eq!(first.write(0, b"x"), 0);
        drop(first);
        // At once: the former one has hung up.
    }
}

#[test]
fn a_client_in_the_middle_of_its_negotiation_has_the_place() {
    let dir = tempfile::tempdir().unwrap();
    let (_device, socket) = open(&place(dir.path(), "a"));
    let mut first = UnixStream::connect(socket.path()).unwrap();
    first.read_exact(&mut [0; 18]).unwrap();
    assert!(is_refused(socket.path()));
}

#[test]
fn what_a_client_that_is_gone_asked_for_is_done_before_the_next_one_is_served() {
    let dir = tempfile::tempdir().unwrap();
    let (device, socket) = open(&place(dir.path(), "a"));
    let mut first = Client::connect(socket.path(), true);
    device.chill(0..4096);
    first.send(command::WRITE, 0, 5, 3, b"old");
    first.send(command::READ, 0, 0, 1, &[]);
    // The write was taken before the read, and both wait.
    soon("the read", || device.waited.load(Ordering::SeqCst) == 1);
    drop(first);
    let path = socket.path().to_owned();
    let served = Arc::new(AtomicBool::new(false));
    let (second, told) = (Arc::clone(&served), Arc::clone(&device));
    let next = std::thread::spawn(move || {
        let mut client = Client::connect(&path, true);
        second.store(true, Ordering::SeqCst);
        assert_eq!(client.write(5, b"new"), 0);
        told.bytes(5, 3)
    });
    for _ in 0..50 {
        assert!(!served.load(Ordering::SeqCst), "served while the former one's write is being done");
        std::thread::yield_now();
    }
    device.warm();
    assert_eq!(next.join().unwrap(), b"new");
    assert_eq!(device.bytes(5, 3), b"new");
}

#[test]
fn a_detached_socket_is_gone_with_its_client() {
    let dir = tempfile::tempdir().unwrap();
    let (device, socket) = open(&place(dir.path(), "a"));
    let mut client = Client::connect(socket.path(), true);
    assert_eq!(client.write(0, b"kept"), 0);
    let path = socket.path().to_owned();
    socket.detach();
    assert!(!path.exists() && client.ended());
    assert!(UnixStream::connect(&path).is_err());
    assert_eq!(device.bytes(0, 4), b"kept");
    // Without a client, and by being dropped.
    let (_device, socket) = open(&place(dir.path(), "a"));
    drop(socket);
    assert!(!path.exists());
}

#[test]
fn a_detach_waits_for_what_the_device_has_begun() {
    let dir = tempfile::tempdir().unwrap();
    let (device, socket) = open(&place(dir.path(), "a"));
    let mut client = Client::connect(socket.path(), true);
    device.chill(0..4096);
    client.send(command::READ, 0, 0, 1, &[]);
    soon("the read", || device.waited.load(Ordering::SeqCst) == 1);
    let detached = Arc::new(AtomicBool::new(false));
    let said = Arc::clone(&detached);
    let detaching = std::thread::spawn(move || {
        socket.detach();
        said.store(true, Ordering::SeqCst);
    });
    assert!(client.ended(), "the client is shut out at once");
    assert!(!detached.load(Ordering::SeqCst));
    device.warm();
    detaching.join().unwrap();
}

#[test]
fn a_socket_that_was_left_is_replaced_and_nothing_else_is() {
    let dir = tempfile::tempdir().unwrap();
    let place = place(dir.path(), "a");
    drop(std::os::unix::net::UnixListener::bind(dir.path().join("a")).unwrap());
    let (_device, socket) = open(&place);
    Client::connect(socket.path(), false);
    // Somebody else's of the same name stays when ours is detached.
    std::fs::remove_file(socket.path()).unwrap();
    std::fs::write(socket.path(), "mine").unwrap();
    let device: Arc<FileDevice> = Arc::new(FileDevice::new(4096));
    assert!(matches!(Socket::open(&place, device.clone()), Err(SocketError::Taken(_))));
    socket.detach();
    assert_eq!(std::fs::read(dir.path().join("a")).unwrap(), b"mine");
    let long = Place { file: "x".repeat(120), ..place };
    assert!(matches!(Socket::open(&long, device), Err(SocketError::TooLong(_))));
}

/// Machine A's user tries everything of B that it can name.
#[test]
fn another_machines_user_gets_nothing() {
    if !is_root() {
        println!("skipped: not root");
        return;
    }
    if !have(&["nbdinfo"]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let (a, b) = (60_001u32, 60_002u32);
    let of = |file: &str, user: u32| {
        let place = Place { owner: user, group: user, peers: vec![user], ..place(dir.path(), file) };
        open(&place)
    };
    let ((_device, mine), (_other, theirs)) = (of("a", a), of("b", b));
    let ask = |path: &Path, export: &str| {
        let mut command = Command::new("nbdinfo");
        command.args(["--size", &format!("nbd+unix:///{export}?socket={}", path.display())]);
        command.uid(a).gid(a);
        command.output().unwrap()
    };
    assert_eq!(ask(mine.path(), "").stdout, b"1048576\n");
    assert_eq!(ask(mine.path(), "disk").stdout, b"1048576\n");
    for export in ["", "disk", "b", "a", "../b"] {
        assert!(!ask(theirs.path(), export).status.success());
    }
    assert!(!ask(mine.path(), "b").status.success(), "there is no other export on one's own");
    // Even if the file let it in, its user does not.
    std::fs::set_permissions(theirs.path(), std::fs::Permissions::from_mode(0o666)).unwrap();
    assert!(!ask(theirs.path(), "").status.success());
    // Nor is root one who may, unless it was said.
    assert!(is_refused(theirs.path()));
    let free = Command::new("nbdinfo").args(["--size", &format!("nbd+unix:///?socket={}", theirs.path().display())]).uid(b).gid(b).output();
    assert_eq!(free.unwrap().stdout, b"1048576\n");
}
