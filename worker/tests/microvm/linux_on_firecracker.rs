//! Linux on the real Firecracker, on a KVM that executes: in a guest of QEMU, whose emulated processor has AMD's SVM.
//!
//! Owns what that guest holds. This executable runs again in it, as root, with one test a process; there a skipped test is a failed one.
//! Slow as it is, it is all of it: the kernel taken out of Debian's image, its drivers, the agent, tasks from their templates to their results.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use volley_guest::initramfs::{MODULES, find_agent, load_order};
use volley_jobspecs::failure::FailureClass;
use volley_jobspecs::keys;
use volley_jobspecs::wire::plan::Isolation;
use volley_jobspecs::wire::report::{AttemptEnd, Ending};
use volley_worker::image::{self, Limits, Source, Store};
use volley_worker::vmm::choice::{self, Choice, Chosen, Programs};

use crate::guest::{Guest, Host};
use crate::support::{World, text};
use crate::tiny_guest::binary;
use crate::{children, failed, host, message, spawner, task};

/// Boot, template and tasks take some two minutes on an idle machine.
const TIME_MAX: Duration = Duration::from_secs(400);
/// What runs the guest's KVM.
const KVM_MODULES: [&str; 1] = ["kvm_amd"];
/// Memory for the worker, a template and two machines.
const MEMORY_MIB: u32 = 2_560;
/// Looks at KVM.
const TRIES: usize = 10;
const INSIDE: &str = "linux_on_firecracker::inside_a_task_runs_in_linux_on_firecracker";
/// A root directory that is a mount point: machines' view of the host is put together by turning from one to another.
const ROOT: &str = "
for module in /kvm/*.ko; do insmod $module; done
mkdir -p /r /usr /sbin && mount --bind / /r
cat > /r/inside <<'END'
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev
mount -t tmpfs -o size=1500m tmp /tmp
export VOLLEY_GUEST_AGENT=/boot/volley-guest VOLLEY_GUEST_KERNEL=/boot/vmlinuz PATH=/bin RUST_BACKTRACE=0 VOLLEY_IN_GUEST=1
/bin/tests --exact $1 --include-ignored --nocapture --test-threads 1
echo \"@end $?\"
END
";

/// The guest; or what is missing.
fn guest() -> Result<Guest, String> {
    let (found, firecracker) = (Host::find()?, binary()?);
    let modules =
        host::part("VOLLEY_GUEST_MODULES", "modules").filter(|dir| dir.is_dir()).ok_or("no guest modules (VOLLEY_GUEST_MODULES)")?;
    let agent = find_agent().map_err(|e| e.to_string())?;
    let read = |path: &Path| std::fs::read(path).map_err(|e| format!("{}: {e}", path.display()));
    let (kernel, mke2fs) = (read(&found.kernel)?, PathBuf::from("/sbin/mke2fs"));
    if !mke2fs.is_file() {
        return Err("no /sbin/mke2fs".to_owned());
    }
    let kvm = load_order(&modules, &KVM_MODULES).map_err(|e| e.to_string())?;
    let mut guest = Guest::new(found, "");
    guest.memory_mib = MEMORY_MIB;
    guest.program(&std::env::current_exe().unwrap(), "/bin/tests");
    guest.program(&mke2fs, "/sbin/mke2fs");
    guest.file("/bin/firecracker", &read(&firecracker)?, 0o755);
    guest.file("/boot/volley-guest", &read(&agent)?, 0o755);
    guest.file("/boot/vmlinuz", &kernel, 0o644);
    for (number, module) in kvm.iter().enumerate() {
        guest.file(&format!("/kvm/{number}.ko"), &read(module)?, 0o644);
    }
    for module in load_order(&modules, &MODULES).map_err(|e| e.to_string())? {
        let to = Path::new("/boot/modules").join(module.strip_prefix(&modules).unwrap());
        guest.file(&to.to_string_lossy(), &read(&module)?, 0o644);
    }
    guest.file("/boot/modules/modules.builtin", &read(&modules.join("modules.builtin"))?, 0o644);
    Ok(guest)
}

#[test]
fn linux_runs_on_firecracker_in_a_guest_whose_kvm_executes() {
    let guest = match guest() {
        Ok(guest) => guest,
        Err(why) => return eprintln!("skipped: {why}"),
    };
    let console = guest.run(&format!("{ROOT}\nchroot /r /bin/sh /inside {INSIDE}"), TIME_MAX);
    println!("{}", console.text);
    let passed = console.text.contains("test result: ok. 1 passed; 0 failed; 0 ignored;") && console.text.contains("@end 0\n");
    assert!(passed && !console.text.contains("skipped:"), "it failed in the guest, was skipped, or was not found");
    assert!(console.off, "the guest did not end within {TIME_MAX:?}");
    println!("took {:?}", console.took);
}

/// An image with busybox, which is linked statically, and some of its names.
async fn an_image(dir: &Path) -> String {
    let files = dir.join("files");
    for name in ["bin", "etc", "proc", "sys", "dev", "run", "tmp", "srv"] {
        std::fs::create_dir_all(files.join(name)).unwrap();
    }
    std::fs::copy("/bin/busybox", files.join("bin/busybox")).unwrap();
    for name in ["sh", "cat", "cut", "date", "dd", "df", "echo", "head", "hostname", "od", "sleep", "tr", "true", "uname"] {
        std::os::unix::fs::symlink("busybox", files.join("bin").join(name)).unwrap();
    }
    let store = Store::open(&dir.join("images")).unwrap();
    let note = image::import(&store, Source::Directory(files), None, Limits::default()).await.unwrap();
    format!("sha256:{}", note.digest.hex())
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "run in a guest"]
async fn inside_a_task_runs_in_linux_on_firecracker() {
    if std::env::var_os("VOLLEY_IN_GUEST").is_none() {
        return;
    }
    let spawner = spawner().unwrap();
    // Nothing is named: KVM executes, and there is a Firecracker in PATH. On a busy machine a guest in a guest may be too slow once to be seen
    // to execute.
    let mut chosen = Err("not tried".to_owned());
    for _ in 0..TRIES {
        chosen = choice::open(Choice::Auto, &Programs::default(), spawner.clone()).await.map_err(|why| why.to_string());
        match &chosen {
            Ok(_) => break,
            Err(why) => println!("again: {why}"),
        }
    }
    let Chosen { vmm, why, .. } = chosen.unwrap();
    println!("chosen: {}: {why}", vmm.capabilities().identity);
    assert_eq!(why, "KVM is usable, and /bin/firecracker is there");
    assert!(!vmm.capabilities().emulated);
    drop(vmm);
    let dir = tempfile::tempdir().unwrap();
    let image = an_image(dir.path()).await;
    let ours = spawner.clone();
    let world = World::start_in(dir, |config| {
        config.isolation = vec![Isolation::Microvm];
        // Its disks are sparse.
        config.disk_bytes = 64 << 30;
        config.machines.spawner = Some(ours);
        config.machines.vmm = Choice::Firecracker;
        config.machines.standby_of_one_max = Some(1);
    });
    let mut w = world.await;
    let begin = Instant::now();
    let script = "uname -r; hostname; df -k /volley | cut -c1-20; echo x > /volley/out/x; \
                  dd if=/dev/zero of=big bs=1M count=64 conv=fsync && echo written";
    let end = with_its_template(&mut w, &task(&image, &format!(r#""command":"{script}""#))).await;
    println!("with its template: {:?}, {:?}", begin.elapsed(), end.timing);
    assert_eq!(end.ending, Ending::Succeeded, "{end:?}");
    println!("{}{}", text(&end.stdout), message(&end));
    // The scratch disk is the one that was put into its slot, with its size and its file system, and what was written to it comes out.
    assert!(text(&end.stdout).contains("-cloud-amd64\n") && text(&end.stdout).contains("/dev/vdf"), "{end:?}");
    assert!(text(&end.stdout).ends_with("\nwritten\n"), "{end:?}");
    assert_eq!(w.objects.read(&keys::attempt_output(&end.name, "x")).unwrap(), b"x\n");
    assert!(message(&end).is_empty() || message(&end).contains(", kvm-emulated)"), "{end:?}");
    let mut random = std::collections::BTreeSet::new();
    let script = r#""command":"head -c 16 /dev/urandom | od -An -tx1; cat /proc/sys/kernel/random/boot_id; date +%s""#;
    for round in 0..4 {
        w.until("a machine that waits", |_| children(spawner.pid()).len() == 1).await;
        tokio::time::sleep(Duration::from_secs(2)).await;
        let (waited, begin) = (children(spawner.pid())[0], Instant::now());
        let end = w.run_one(&task(&image, script)).await;
        println!("round {round}: {:?}, {:?}", begin.elapsed(), end.timing);
        assert_eq!(end.ending, Ending::Succeeded, "{end:?}");
        assert!(!children(spawner.pid()).contains(&waited), "it was in the machine that waited");
        let said = text(&end.stdout);
        let mut lines = said.lines();
        assert!(random.insert(lines.next().unwrap().to_owned()) && random.insert(lines.next().unwrap().to_owned()), "{random:?}");
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
        let told: u64 = lines.next().unwrap().parse().unwrap();
        assert!(now.abs_diff(told) <= 5, "{now} {told}");
    }
    ends_are_told(&mut w, &image).await;
    w.finish().await;
    assert_eq!(children(spawner.pid()), Vec::<u32>::new());
}

/// Codes, signals, a panic, and a guest that is out of memory.
async fn ends_are_told(w: &mut World, image: &str) {
    for (script, class, code) in [("exit 42", FailureClass::ExitCode, Some(42)), ("kill -SEGV $$", FailureClass::Signal, Some(11))] {
        let end = w.run_one(&task(image, &format!(r#""command":"{script}""#))).await;
        assert_eq!((end.ending, end.code), (failed(class), code), "{end:?}");
    }
    let end = w.run_one(&task(image, r#""command":"echo c > /proc/sysrq-trigger""#)).await;
    println!("panic: {}", message(&end));
    assert_eq!(end.ending, failed(FailureClass::GuestLost), "{end:?}");
    assert!(message(&end).contains("the guest's kernel panicked (not syncing: sysrq triggered crash)"), "{end:?}");
    let end = w.run_one(&task(image, r#""command":"x=$(dd if=/dev/zero bs=1M count=100 | tr '\\0' x); echo $${#x}""#)).await;
    println!("memory: {:?} {}", end.ending, message(&end));
    assert_eq!(end.ending, failed(FailureClass::Oom), "{end:?}");
}

/// How the first task ended, which waits for its template: a boot, for which a busy machine takes longer than for all that other tests wait for.
async fn with_its_template(w: &mut World, task: &str) -> AttemptEnd {
    let (job, _) = w.job(r#"{"count":1}"#, &task.replacen(r#""start":"80s""#, r#""start":"240s""#, 1));
    let (_, order) = w.bundle(job, 0, 1);
    w.order(vec![order]).await;
    let begin = Instant::now();
    loop {
        if let Some(end) = w.ends().into_iter().find(|end| end.name.job == job) {
            return end;
        }
        assert!(begin.elapsed() < Duration::from_secs(250));
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
