//! Where VMMs can't be shut off from their host, machines are not offered unless that is allowed.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use volley_worker::MachineConfig;
use volley_worker::machines::{Machines, MachinesError};
use volley_worker::vmm::spawner::MachineSpawner;

use crate::image;

/// Debian's user without any rights.
pub const NOBODY: u32 = 65_534;
/// Where the test that runs as nobody finds what it can't read elsewhere.
const PLACE: &str = "VOLLEY_TEST_PLACE";

#[tokio::test(flavor = "multi_thread")]
#[ignore = "started by the test below"]
async fn as_nobody() {
    let Some(place) = std::env::var_os(PLACE).map(PathBuf::from) else { return };
    let spawner = match MachineSpawner::start() {
        Ok(spawner) => spawner,
        Err(why) => return println!("skipped: {why}"),
    };
    let mut config = MachineConfig::new(&place);
    config.agent = Some(place.join("agent"));
    config.spawner = Some(spawner.clone());
    let missing = spawner.missing().join(", ");
    let refused = Machines::open(&config, &place.join("machines"), 1, None).await.unwrap_err();
    assert!(matches!(refused, MachinesError::Unconfined { .. }), "{refused}");
    println!("refused: {refused}");
    assert!(refused.to_string().starts_with(&format!("machines can't be shut off from the host here, what is missing: {missing}; ")));
    config.allow_unconfined = true;
    let machines = Machines::open(&config, &place.join("machines"), 1, None).await.unwrap_or_else(|why| panic!("{why}"));
    println!("label: {}", machines.label().unwrap());
    machines.close().await;
}

#[tokio::test]
async fn without_root_machines_are_refused_in_one_line_unless_they_are_allowed() {
    let place = tempfile::tempdir().unwrap();
    // As what the test needs is what a world needs.
    if let Err(why) = image::busybox(&place.path().join("unused")).await {
        return eprintln!("skipped: {why}");
    }
    let open = |path: &Path, mode| std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    let copy = |from: &Path, name: &str| {
        let to = place.path().join(name);
        assert!(Command::new("cp").arg("-rL").arg(from).arg(&to).status().unwrap().success());
        assert!(Command::new("chmod").args(["-R", "a+rX"]).arg(&to).status().unwrap().success());
        to
    };
    open(place.path(), 0o777);
    let program = copy(&std::env::current_exe().unwrap(), "test");
    copy(&volley_guest::initramfs::find_agent().unwrap(), "agent");
    let kernel = copy(&crate::host::part("VOLLEY_GUEST_KERNEL", "vmlinuz").unwrap(), "vmlinuz");
    let modules = copy(&crate::host::part("VOLLEY_GUEST_MODULES", "modules").unwrap(), "modules");
    let ran = Command::new(program)
        .args(["--exact", "unconfined::as_nobody", "--ignored", "--nocapture"])
        .env(PLACE, place.path())
        .env("VOLLEY_GUEST_KERNEL", kernel)
        .env("VOLLEY_GUEST_MODULES", modules)
        .uid(NOBODY)
        .gid(NOBODY)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&ran.stdout);
    eprintln!("{said}");
    if said.contains("skipped: ") {
        return;
    }
    assert!(ran.status.success(), "{said} {}", String::from_utf8_lossy(&ran.stderr));
    assert!(said.contains("what is missing: a user for each machine (the worker is not root)"), "{said}");
    assert!(said.contains("its machine's VMM had to do without a user for each machine (the worker is not root)"), "{said}");
}
