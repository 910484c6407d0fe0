//! Files into machines and out of them, and much output.

use volley_jobspecs::ids::TenantId;
use volley_jobspecs::keys;
use volley_jobspecs::wire::report::Ending;

use crate::support::{sha256, text};
use crate::{image, message, task, world};

#[tokio::test(flavor = "multi_thread")]
async fn inputs_go_in_outputs_come_out_and_a_stream_may_be_long() {
    let Some((mut w, image)) = world(|config| config.stream_bytes_max = 1 << 20).await else { return };
    let tenant = TenantId::new("public").unwrap();
    w.objects.put_now(&keys::upload(&tenant, "u1"), b"#!/bin/sh\necho from an input\n");
    let inputs = r#""inputs":[{"from":"upload:u1","path":"data/in.txt"},{"from":"upload:u1","path":"run","executable":true}]"#;
    let script = concat!(
        "set -e; ./run; cat data/in.txt > /volley/out/copy; stat -c %a data/in.txt run; mkdir -p made/deep /volley/out/sub; ",
        "echo one > made/deep/one; echo two > made/two; echo three > /volley/out/sub/three; ln -s /etc/passwd /volley/out/link; mkfifo /volley/out/pipe; ",
        r#"dd if=/dev/zero of=/volley/out/holes bs=1 count=1 seek=1048575 2>/dev/null; echo '{\"n\":1}' > /volley/out/result.json; "#,
        "rm data/in.txt; df /volley/work | head -n 2 | wc -l",
    );
    let outputs = r#""outputs":["made","data/in.txt","none"]"#;
    let end = w.run_one(&task(&image, &format!(r#""command":"{script}",{inputs},{outputs}"#))).await;
    assert_eq!(end.ending, Ending::Succeeded, "{end:?}");
    assert_eq!(text(&end.stdout), "from an input\n444\n555\n2\n");
    assert_eq!(end.result.as_ref().map(|result| result.to_vec()), Some(b"{\"n\":1}\n".to_vec()));
    let kept = |path: &str| w.objects.read(&keys::attempt_output(&end.name, path));
    assert_eq!(kept("copy").as_deref(), Some(&b"#!/bin/sh\necho from an input\n"[..]));
    assert_eq!((kept("made/deep/one"), kept("made/two")), (Some(b"one\n".to_vec()), Some(b"two\n".to_vec())));
    assert_eq!((kept("sub/three"), kept("holes").map(|holes| holes.len())), (Some(b"three\n".to_vec()), Some(1 << 20)));
    assert_eq!(kept("data/in.txt"), None, "the task removed it");
    assert_eq!(end.outputs.unwrap().files, 5);
    assert!(message(&end).contains("link (symbolic link)") && message(&end).contains("no plain files: pipe"), "{end:?}");
    let manifest = String::from_utf8(w.objects.read(&keys::attempt_manifest(&end.name)).unwrap()).unwrap();
    assert!(manifest.contains(&sha256(b"one\n")), "{manifest}");

    // 64 MiB and a last word: counted whole, its ends kept.
    let begin = std::time::Instant::now();
    let end = w.run_one(&task(&image, r#""command":"dd if=/dev/zero bs=65536 count=1024 2>/dev/null; echo last""#)).await;
    eprintln!("64 MiB of output: {:?}", begin.elapsed());
    let stdout = end.stdout.clone().unwrap();
    assert_eq!((end.ending, stdout.bytes, stdout.truncated), (Ending::Succeeded, (64 << 20) + 5, true), "{:?}", end.message);
    assert!(stdout.tail.ends_with(b"\0last\n"));
    // Nothing of the first task is seen by the next one.
    let end = w
        .run_one(&task(&image, r#""command":"ls -A /volley/work /volley/out /tmp | wc -w; echo more > /volley/out/x; rm -r /volley/out""#))
        .await;
    assert_eq!((end.ending, text(&end.stdout).as_str()), (Ending::Succeeded, "3\n"), "{end:?}");
    // A link in the place of a directory leads nowhere.
    let links =
        r#""command":"rm -r /volley/out; ln -s / /volley/out; cd /; rm -r /volley/work; ln -s /etc /volley/work","outputs":["release"]"#;
    let end = w.run_one(&task(&image, links)).await;
    assert_eq!((end.ending, end.outputs), (Ending::Succeeded, None), "{:?}", end.message);
    // As the image's user, with the image's environment.
    let user = task(
        image::OF_USER,
        r#""command":"id -u; id -g; echo $FROM $PATH $HOME; cat run; echo x > /tmp/x; echo x > x; echo x > /volley/out/x","inputs":[{"from":"upload:u1","path":"deep/run"}],"workdir":"deep""#,
    );
    let end = w.run_one(&user).await;
    let told = "1000\n1001\nimage /bin /volley/work\n#!/bin/sh\necho from an input\n";
    assert_eq!((end.ending, text(&end.stdout).as_str()), (Ending::Succeeded, told), "{end:?}");
    assert_eq!(end.outputs.unwrap().files, 1);
    // More than its disk.
    let small = format!(
        r#"{{"isolation":"microvm","image":"{image}","resources":{{"memory":"64MiB","disk":"16MiB"}},"command":"dd if=/dev/zero of=big bs=1M count=40""#
    );
    let end = w.run_one(&format!("{small}}}")).await;
    assert!(end.code == Some(1) && text(&end.stderr).contains("No space left"), "{end:?}");
    assert!(message(&end).contains("its machine's disk was full; raise task.resources.disk"), "{end:?}");
    w.finish().await;
}
