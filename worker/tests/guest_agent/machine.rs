//! The agent as the first process of a Linux guest, over a virtio port, and through snapshots.

use std::sync::Arc;

use volley_jobspecs::wire::guest::Exit;

use crate::qemu::{Machine, Parts};
use crate::{run, shell};

/// Everything that machines need, or none, and the reason is printed.
fn parts() -> Option<Arc<Parts>> {
    Parts::find().map_err(|why| eprintln!("skipped: {why}")).ok()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_boots_and_does_what_it_is_asked() {
    let Some(parts) = parts() else { return };
    let machine = Machine::boot(&parts, &[], "");
    let (guest, hello) = machine.guest(1, false).await.unwrap();
    assert!(hello.limits && !hello.reseed_due, "{hello:?}");
    let end = run(&guest, &shell("echo out; echo err >&2; exit 3")).await;
    assert_eq!((end.output.as_str(), end.errors.as_str(), end.ended.exit), ("out\n", "err\n", Exit::Code(3)), "{:?}", end.ended);
}
