//! What only containers can do wrong, or cost.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use volley_jobspecs::failure::FailureClass;
use volley_jobspecs::wire::plan::Isolation;
use volley_jobspecs::wire::report::{AttemptEnd, Ending};
use volley_worker::{Config, containers::Runtime};

use crate::image;
use crate::support::{World, text};

/// A worker with containers, and its image; or none, and what is missing is printed.
async fn world(change: impl FnOnce(&mut Config, &Path)) -> Option<(World, String, PathBuf)> {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: images are mounted only where the worker is root");
        return None;
    }
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o711)).unwrap();
    let made = match Runtime::find(None) {
        Ok(_) => image::make(&dir.path().join("images")).await,
        Err(why) => Err(why.to_string()),
    };
    let (image, path) = match made {
        Ok(image) => (image, dir.path().to_owned()),
        Err(why) => {
            eprintln!("skipped: {why}");
            return None;
        }
    };
    let world = World::start_in(dir, |config| {
        config.isolation = vec![Isolation::Process, Isolation::Container];
        config.cgroups = true;
        change(config, &path);
    });
    Some((world.await, image, path))
}

fn task(image: &str, rest: &str) -> String {
    format!(r#"{{"isolation":"container","image":"{image}",{rest}}}"#)
}

fn message(end: &AttemptEnd) -> &str {
    end.message.as_deref().unwrap_or_default()
}

/// A program that stands in for a runtime: it runs the first container, and does `otherwise` with others.
fn stand_in(dir: &Path, otherwise: &str) -> PathBuf {
    let path = dir.join("runtime");
    let script = format!("#!/bin/sh\ncase \"$*\" in\n*--version*|*trial*) exec crun \"$@\";;\nesac\n{otherwise}\n");
    std::fs::write(&path, script).unwrap();
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
    path
}

/// Devices with a file of this directory.
fn attached(dir: &Path) -> Vec<PathBuf> {
    let devices = std::fs::read_dir("/sys/block").unwrap().flatten().map(|entry| entry.path());
    let file = |device: &PathBuf| std::fs::read_to_string(device.join("loop/backing_file")).unwrap_or_default();
    devices.filter(|device| file(device).contains(&*dir.to_string_lossy())).collect()
}

async fn until(what: &str, done: impl Fn() -> bool) {
    let begin = Instant::now();
    while !done() {
        assert!(begin.elapsed() < Duration::from_secs(20), "waited too long for {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_runtime_containers_are_not_offered() {
    let Some((w, ..)) = world(|config, _| config.containers.runtime = Some("/no/such/crun".into())).await else { return };
    assert_eq!(w.last_beat().info.isolation, [Isolation::Process]);
    w.finish().await;
    // A runtime that runs nothing, and nothing else to offer.
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o711)).unwrap();
    let broken = dir.path().join("crun");
    std::fs::write(&broken, "#!/bin/sh\ncase \"$*\" in *--version*) echo crun version 0;; *) echo no luck >&2; exit 1;; esac\n").unwrap();
    std::fs::set_permissions(&broken, PermissionsExt::from_mode(0o755)).unwrap();
    let w = World::start(|_| {}).await;
    let mut config = Config::new(volley_jobspecs::ids::WorkerId::new("w2").unwrap(), dir.path().to_owned());
    config.isolation = vec![Isolation::Container];
    config.containers.runtime = Some(broken);
    let (_handle, control) = volley_worker::control();
    let ended = volley_worker::run(config, w.bus.clone(), w.objects.clone(), None, control).await;
    let said = ended.expect_err("it can't begin").to_string();
    assert!(said.contains("a container that was tried did not run: the container's runtime failed (exit code 1): no luck"), "{said}");
    w.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_runtime_that_fails_is_no_verdict_on_the_task() {
    let change = |config: &mut Config, dir: &Path| {
        let otherwise = format!("test -e {}/ok && exec crun \"$@\"; echo the bundle is refused >&2; exit 1", dir.display());
        config.containers.runtime = Some(stand_in(dir, &otherwise));
        config.slots = 1;
    };
    let Some((mut w, image, dir)) = world(change).await else { return };
    let end = w.run_one(&task(&image, r#""command":["true"]"#)).await;
    assert_eq!(end.ending, Ending::Failed(FailureClass::RestoreFailed), "{end:?}");
    assert!(message(&end).contains("the container's runtime failed (exit code 1): the bundle is refused"), "{end:?}");
    // The slot goes on, with a helper and mounts of its own.
    std::fs::write(dir.join("ok"), "").unwrap();
    let end = w.run_one(&task(&image, r#""command":["cat","/etc/release"]"#)).await;
    assert_eq!((end.ending, text(&end.stdout).as_str()), (Ending::Succeeded, "the image\n"), "{end:?}");
    let end = w.run_one(&task(image::OF_NOBODY, r#""command":["true"]"#)).await;
    assert_eq!(end.ending, Ending::Failed(FailureClass::InputMissing), "{end:?}");
    assert!(message(&end).contains("\"bob\""), "{end:?}");
    let end = w.run_one(&task("no-such:image", r#""command":["true"]"#)).await;
    assert!(end.ending == Ending::Failed(FailureClass::RestoreFailed) && message(&end).contains("no image"), "{end:?}");
    w.finish().await;
    // One that never comes to an end is killed with everything else.
    let change =
        |config: &mut Config, dir: &Path| config.containers.runtime = Some(stand_in(dir, "trap '' TERM; while :; do sleep 1; done"));
    let Some((mut w, image, _)) = world(change).await else { return };
    let end = w.run_one(&task(&image, r#""command":["true"],"timeouts":{"run":"300ms","grace":"300ms"}"#)).await;
    assert_eq!(end.ending, Ending::Failed(FailureClass::RunTimeout), "{end:?}");
    w.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn links_of_an_image_lead_nowhere() {
    let Some((mut w, _, dir)) = world(|_, _| {}).await else { return };
    let image = image::make_hostile(&dir.join("images")).await.unwrap();
    let script = "ls -A /tmp /volley; echo x > /tmp/x; echo y > /volley/out/y; test -e /proc/self/stat && test -c /dev/null && pwd";
    let end = w.run_one(&task(&image, &format!(r#""command":"{script}""#))).await;
    assert_eq!(text(&end.stdout), "/tmp:\n\n/volley:\nout\nwork\n/volley/work\n", "{end:?}");
    assert_eq!(end.outputs.as_ref().map(|outputs| outputs.files), Some(1), "{end:?}");
    assert!(!Path::new("/etc/x").exists() && !Path::new("/etc/out").exists() && !Path::new("/etc/work").exists());
    w.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_first_process_is_closed_to_its_task() {
    let Some((mut w, image, _)) = world(|_, _| {}).await else { return };
    // Of the same user, with the rights that root has there.
    let script = "kill -9 1; kill -TERM 1; cat /proc/1/environ || echo closed; readlink /proc/1/fd/3 || echo closed; (echo forged > /proc/1/fd/3) || echo closed; exit 7";
    let end = w.run_one(&task(&image, &format!(r#""command":"exec 2>/dev/null; {script}""#))).await;
    assert_eq!((end.ending, end.code), (Ending::Failed(FailureClass::ExitCode), Some(7)), "{end:?}");
    assert_eq!(text(&end.stdout), "closed\nclosed\nclosed\n", "{end:?}");
    let end = w.run_one(&task(image::OF_USER, &format!(r#""command":"exec 2>/dev/null; {script}""#))).await;
    assert_eq!((end.code, text(&end.stdout).as_str()), (Some(7), "closed\nclosed\nclosed\n"), "{end:?}");
    w.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_left_of_containers() {
    let Some((mut w, image, dir)) = world(|config, _| config.slots = 1).await else { return };
    let write = r#""command":"mkdir -p /srv/a; dd if=/dev/zero of=/srv/a/f bs=1024 count=64 2>/dev/null; (setsid sleep 300 &); exit 0""#;
    for image in [&image, image::OF_USER, &image] {
        let end = w.run_one(&task(image, write)).await;
        assert!(matches!(end.ending, Ending::Succeeded), "{end:?}");
    }
    assert_eq!(attached(&dir).len(), 1, "one device for one disk");
    let slot = dir.join("containers/0");
    until("what was written is gone", || !slot.join("upper").exists() && !slot.join("ovl/work").exists()).await;
    assert_eq!(std::fs::read_dir(slot.join("root")).unwrap().count(), 0);
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(!mounts.contains(&*dir.to_string_lossy()), "mounted on the host: {mounts}");
    assert_eq!(std::fs::read_dir(slot.join("state")).map_or(0, Iterator::count), 0);
    w.finish().await;
    until("its device is free", || attached(&dir).is_empty()).await;
}

/// The other half of the next test: a worker in a process of its own, until it is killed.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "run by the test below"]
async fn a_worker_that_will_be_killed() {
    let Some(note) = std::env::var_os("VOLLEY_TEST_NOTE").map(PathBuf::from) else { return };
    let Some((mut w, image, dir)) = world(|_, _| {}).await else { return };
    std::fs::write(&note, dir.as_os_str().as_encoded_bytes()).unwrap();
    w.run_one(&task(&image, r#""command":"setsid sleep 4711 & sleep 4712""#)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_worker_leaves_no_container() {
    if Runtime::find(None).is_err() || !rustix::process::geteuid().is_root() {
        return eprintln!("skipped: no crun, or not root");
    }
    let place = tempfile::tempdir().unwrap();
    let note = place.path().join("note");
    let test = "container::a_worker_that_will_be_killed";
    let mut child = Command::new(std::env::current_exe().unwrap());
    let mut child = child.args(["--exact", test, "--ignored"]).env("VOLLEY_TEST_NOTE", &note).stdout(Stdio::null()).spawn().unwrap();
    let sleeping = || {
        let all = std::fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.path().join("cmdline"));
        all.filter_map(|path| std::fs::read(path).ok())
            .filter(|line| line.ends_with(b"\x004711\0") || line.ends_with(b"\x004712\0"))
            .count()
    };
    until("both processes", || sleeping() == 2).await;
    let dir = PathBuf::from(std::fs::read_to_string(&note).unwrap());
    assert_eq!(attached(&dir).len(), 1);
    child.kill().unwrap();
    child.wait().unwrap();
    until("the end of both", || sleeping() == 0).await;
    until("its device is free", || attached(&dir).is_empty()).await;
    std::fs::remove_dir_all(&dir).unwrap();
}

/// `cargo nextest run -p volley-worker --test conformance --run-ignored only --no-capture costs`
#[tokio::test(flavor = "multi_thread")]
#[ignore = "a measurement, not a check"]
async fn costs() {
    const ROUNDS: usize = 40;
    let Some((mut w, image, dir)) = world(|config, _| config.slots = 1).await else { return };
    let median = |mut times: Vec<f64>| {
        times.sort_by(f64::total_cmp);
        (times[times.len() / 2], times[times.len() * 9 / 10])
    };
    let process = r#"{"isolation":"process","command":["/bin/true"]}"#;
    let container = task(&image, r#""command":["/bin/true"]"#);
    for (name, spec) in [("process", process.to_owned()), ("container", container)] {
        let (mut whole, mut run) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            let begin = Instant::now();
            let end = w.run_one(&spec).await;
            whole.push(begin.elapsed().as_secs_f64() * 1e3);
            run.push(f64::from(end.timing.prepare_ms + end.timing.run_ms));
            assert_eq!(end.ending, Ending::Succeeded, "{end:?}");
        }
        eprintln!("{name}: order to report {:?} ms (median, 90 %); prepare and run {:?}", median(whole), median(run));
    }
    for (name, bundle) in [("as `crun spec` has it", bare_bundle(None)), ("configured the same", bare_bundle(Some(&dir)))] {
        let mut times = Vec::new();
        for number in 0..ROUNDS {
            let begin = Instant::now();
            let bundle = bundle.path().to_string_lossy().into_owned();
            let mut script = in_own_mounts(&["crun", "--cgroup-manager=disabled", "run", "--bundle", &bundle, &format!("bare{number}")]);
            let status = script.stdin(Stdio::null()).status().unwrap();
            times.push(begin.elapsed().as_secs_f64() * 1e3);
            assert!(status.success());
        }
        eprintln!("crun run of /bin/true in a directory, by a script, {name}: {:?} ms", median(times));
    }
    w.finish().await;
}

/// A bundle with busybox: as `crun spec` makes it, or as the worker in this directory had its last one, without what is the worker's own.
fn bare_bundle(worker: Option<&Path>) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o711)).unwrap();
    std::fs::create_dir_all(dir.path().join("rootfs/bin")).unwrap();
    let busybox = std::env::split_paths(&std::env::var_os("PATH").unwrap()).map(|dir| dir.join("busybox")).find(|file| file.is_file());
    std::fs::copy(busybox.unwrap(), dir.path().join("rootfs/bin/true")).unwrap();
    for name in ["rootfs", "rootfs/bin"] {
        std::os::unix::fs::chown(dir.path().join(name), Some(80_000), Some(80_000)).unwrap();
    }
    assert!(Command::new("crun").arg("spec").current_dir(dir.path()).status().unwrap().success());
    let path = dir.path().join("config.json");
    let read = |path: &Path| serde_json::from_slice::<serde_json::Value>(&std::fs::read(path).unwrap()).unwrap();
    let mut spec = read(&worker.map_or(path.clone(), |dir| dir.join("containers/0/config.json")));
    spec["root"]["path"] = "rootfs".into();
    spec["process"]["terminal"] = false.into();
    spec["process"]["args"] = serde_json::json!(["/bin/true"]);
    spec["mounts"].as_array_mut().unwrap().retain(|mount| mount["type"] != "bind");
    std::fs::write(path, spec.to_string()).unwrap();
    dir
}

/// In its own mounts, without the half of the cgroups that crun refuses on some hosts.
fn in_own_mounts(words: &[&str]) -> Command {
    let mut command = Command::new("unshare");
    command.args(["-m", "sh", "-c", "umount /sys/fs/cgroup/unified 2>/dev/null; exec \"$@\"", "sh"]).args(words);
    command
}
