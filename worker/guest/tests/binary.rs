//! The agent's program as an ordinary build makes it.

use std::path::Path;

use volley_guest::initramfs;

#[test]
fn it_is_static_and_goes_into_a_ram_disk() {
    let agent = Path::new(env!("CARGO_BIN_EXE_volley-guest"));
    let binary = std::fs::read(agent).unwrap();
    assert!(initramfs::is_static(&binary));
    /// It lies in the memory of every machine.
    const BYTES_MAX: usize = 4 << 20;
    assert!(binary.len() < BYTES_MAX, "{} bytes", binary.len());
    assert_eq!(initramfs::find_agent().unwrap().file_name(), agent.file_name());
    let disk = initramfs::build(agent, None, &initramfs::MODULES).unwrap();
    assert!(disk.starts_with(b"070701") && disk.len() > binary.len());
}

#[test]
fn without_a_channel_it_says_how_it_is_started() {
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_volley-guest")).output().unwrap();
    assert!(!output.status.success() && String::from_utf8_lossy(&output.stderr).starts_with("usage: "));
}
