//! What the cluster does to volumes that somebody else writes: pins, promotions, removals, each as often as it likes.
#![expect(clippy::unwrap_used, reason = "a test says with a panic that it failed")]

mod support;

use support::{Fault, MIB, World, id, new, opener, quiet, snap};
use volley_jobspecs::ids::{AttemptName, JobId};
use volley_volume::device::Device;
use volley_volume::format::head::FlushMode;
use volley_volume::{OpenError, Opener, Pinned, Promotion};

fn attempt() -> AttemptName {
    AttemptName { job: JobId(7), stage: 0, index: 3, number: 1, sequence: 9 }
}

fn by(attach: u8) -> Opener {
    Opener { attempt: Some(attempt()), ..opener(attach) }
}

#[test]
fn a_job_has_what_was_accepted_when_it_was_pinned() {
    let world = World::new();
    let (host, requests) = world.host("a", quiet());
    host.create(new(id(1), MIB, FlushMode::Local)).unwrap();
    let volume = host.attach(id(1), &by(1)).unwrap();
    volume.write(0, &[1; 4096], false).unwrap();
    let (content, _) = volume.detach().unwrap();

    let (pinned, accepted) =
        (Pinned::Accepted(id(1), snap(1)), Promotion { volume: id(1), attempt: Some(attempt()), base: 0, root: content.digest() });
    host.pin("j7", pinned).unwrap();
    host.promote(&accepted).unwrap();
    // Whoever leads next does it again, and takes what is there.
    host.pin("j7", pinned).unwrap();
    host.promote(&accepted).unwrap();
    host.pin("j8", Pinned::Accepted(id(1), snap(2))).unwrap();
    let first = |snapshot, clone| {
        let clone = host.clone_ephemeral(snapshot, id(clone), FlushMode::None, false).unwrap();
        let mut block = [7; 4096];
        clone.read(0, &mut block).unwrap();
        block[0]
    };
    assert_eq!((first(snap(1), 11), first(snap(2), 12)), (0, 1));
    assert!(host.pin("j9", Pinned::Snapshot(snap(3))).is_err(), "there is none");
    requests.take();
    host.unpin("j7").unwrap();
    assert_eq!(requests.take().iter().filter(|(what, _)| *what == "delete").count(), 1);
    host.unpin("j7").unwrap();
}

#[test]
fn an_answer_that_is_lost_is_no_second_promotion() {
    for fault in [Fault::LoseAnswer, Fault::LoseRequest] {
        let world = World::new();
        let (host, requests) = world.host("a", quiet());
        host.create(new(id(1), MIB, FlushMode::Local)).unwrap();
        let volume = host.attach(id(1), &by(1)).unwrap();
        volume.write(0, &[1; 4096], false).unwrap();
        let (content, _) = volume.detach().unwrap();
        let root = content.digest();
        requests.fault(fault);
        host.promote(&Promotion { volume: id(1), attempt: Some(attempt()), base: 0, root }).unwrap();
        // The next writer begins with it; what another attempt claims is refused.
        let other = Promotion { volume: id(1), attempt: Some(AttemptName { number: 2, ..attempt() }), base: 1, root };
        assert!(matches!(host.promote(&other), Err(OpenError::Move(_))), "{fault:?}");
    }
}

#[test]
fn a_removed_volume_is_nobodys_any_more() {
    let world = World::new();
    let (host, requests) = world.host("a", quiet());
    host.remove(id(9), true).unwrap();
    host.create(new(id(1), MIB, FlushMode::Local)).unwrap();
    let volume = host.attach(id(1), &by(1)).unwrap();
    volume.write(0, &[1; 4096], false).unwrap();
    requests.fault(Fault::LoseAnswer);
    host.remove(id(1), true).unwrap();
    host.remove(id(1), true).unwrap();
    assert!(volume.detach().is_err(), "what it wrote is committed nowhere");
    assert!(matches!(host.attach(id(1), &by(2)), Err(OpenError::Move(_))));
}
