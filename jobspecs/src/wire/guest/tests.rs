//! Answers a guest might make up, and sizes that must fit into each other.

use proptest::prelude::*;

use super::*;
use crate::wire::{decode, encode};

#[test]
fn the_longest_answer_fits() {
    let skipped = Skipped { path: "x".repeat(SKIPPED_NAME_BYTES_MAX), why: SkipReason::Outside };
    let files = Files { entries: u64::MAX, bytes: u64::MAX, skipped: vec![skipped; SKIPPED_LISTED_MAX], skipped_total: u64::MAX };
    assert!(encode(&Answer::Files(files)).len() <= ANSWER_BYTES_MAX);
    let refusal = Refusal::new(RefusalKind::System, "é".repeat(TEXT_BYTES_MAX));
    assert!(refusal.text.len() <= TEXT_BYTES_MAX && refusal.text.ends_with('é'));
    assert!(encode(&Answer::Refused(refusal)).len() <= ANSWER_BYTES_MAX);
}

#[test]
fn what_an_agent_does_not_know_is_refused_and_not_guessed() {
    // A request with number 99.
    assert!(decode::<Request>("request", &[0x82, 0x18, 99, 0x80]).is_err());
    let exec = Exec { argv: vec!["true".into()], ..Exec::default() };
    assert_eq!(decode::<Request>("request", &encode(&Request::Exec(exec.clone()))).ok(), Some(Request::Exec(exec)));
}

#[test]
fn a_list_that_only_claims_to_be_long_costs_nothing() {
    // `Files` with a list of 2^62 entries, of which none follows.
    let mut bytes = vec![0x82, 0x04, 0x81, 0xa1, 0x02, 0x9b];
    bytes.extend_from_slice(&(1u64 << 62).to_be_bytes());
    assert!(decode::<Answer>("answer", &bytes).is_err());
}

proptest! {
    #[test]
    fn no_bytes_panic(bytes: Vec<u8>) {
        let _ = (decode::<Answer>("answer", &bytes), decode::<Request>("request", &bytes));
    }

    #[test]
    fn cut_and_changed_answers_do_not_panic(at: usize, byte: u8, cut: usize) {
        let usage = Usage { wall_ms: 1 << 40, user_us: 2, system_us: 3, memory_peak_bytes: Some(4) };
        let mut bytes = encode(&Answer::Ended(Ended { exit: Exit::Code(3), timed_out: true, oom_kills: 1, usage, survivors: 0, disk_full: false, strays: 0 }));
        let (at, cut) = (at % bytes.len(), cut % bytes.len());
        bytes[at] = byte;
        let _ = (decode::<Answer>("answer", &bytes), decode::<Answer>("answer", &bytes[..cut]));
    }
}
