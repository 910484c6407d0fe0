//! Output that is sent while somebody watches, and what was written before.

use std::time::Duration;

use volley_jobspecs::wire;
use volley_jobspecs::wire::live::{Asked, Held, Live, Watch};

use crate::support::{World, state};
use crate::task;

#[tokio::test(flavor = "multi_thread")]
async fn live_output_is_sent_while_somebody_watches() {
    let mut w = World::start(|_| {}).await;
    let (job, _) = w.job(r#"{"count":1}"#, &task(r#""command":"echo early; sleep 0.3; echo late >&2""#));
    let (_, order) = w.bundle(job, 0, 1);
    let watches = state(&w.bus).watches.lock().unwrap().clone().unwrap();
    watches.send((job, Watch::default())).await.unwrap();
    w.order(vec![order]).await;
    w.end_of(job).await;
    assert_eq!(state(&w.bus).live.lock().unwrap().len(), 2);
    w.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_comes_later_is_sent_what_was_written_before_without_a_gap() {
    let mut w = World::start(|_| {}).await;
    // Writes all the time, so that every border between before and after is one that can be missed.
    let script =
        "for i in $(seq 1 4000); do echo line $i; done; touch written; for i in $(seq 4001 9000); do echo line $i; done; sleep 0.3";
    let (job, _) = w.job(r#"{"count":2}"#, &task(&format!(r#""command":"{script}; echo end >&2""#)));
    let (_, order) = w.bundle(job, 0, 2);
    w.order(vec![order]).await;
    tokio::time::sleep(Duration::from_millis(60)).await;
    assert!(state(&w.bus).live.lock().unwrap().is_empty());
    let watches = state(&w.bus).watches.lock().unwrap().clone().unwrap();
    watches.send((job, Watch { held: Some(Asked::One(0)) })).await.unwrap();
    w.until("both ends", |w| w.ends().len() == 2).await;
    let lives: Vec<Live> = state(&w.bus).live.lock().unwrap().iter().map(|bytes| wire::decode("live", bytes).unwrap()).collect();
    let of = |index: u32| lives.iter().filter(move |live| live.name.index == index);
    let mut read: Vec<u8> = Vec::new();
    for live in of(0).filter(|live| !live.stderr && live.held != Some(Held::End)) {
        assert_eq!(live.offset, read.len() as u64, "pieces follow each other");
        read.extend_from_slice(&live.bytes);
    }
    let whole: String = (1..=9000).map(|n| format!("line {n}\n")).collect();
    assert_eq!(String::from_utf8_lossy(&read), whole);
    assert_eq!(of(0).filter(|live| live.held == Some(Held::End)).count(), 1);
    assert!(of(1).all(|live| live.held != Some(Held::End)), "it was not asked of task 1");
    w.finish().await;
}
