//! Raw limits of this machine, measured in the same run.

use std::time::Instant;

use async_nats::jetstream;

/// Messages of 200 bytes a second into a JetStream log with 256 in flight, on the same server and so with the same sync.
pub async fn publish_rate(url: &str) -> f64 {
    const MESSAGES: usize = 20_000;
    const IN_FLIGHT: usize = 256;
    let context = jetstream::new(async_nats::connect(url).await.unwrap());
    let config = jetstream::stream::Config { name: "RAW".to_owned(), subjects: vec!["raw".to_owned()], ..Default::default() };
    context.get_or_create_stream(config).await.unwrap();
    let started = Instant::now();
    let mut acks = std::collections::VecDeque::new();
    for _ in 0..MESSAGES {
        acks.push_back(context.publish("raw", vec![7u8; 200].into()).await.unwrap());
        if acks.len() >= IN_FLIGHT {
            acks.pop_front().unwrap().await.unwrap();
        }
    }
    for ack in acks {
        ack.await.unwrap();
    }
    context.delete_stream("RAW").await.unwrap();
    MESSAGES as f64 / started.elapsed().as_secs_f64()
}

/// `posix_spawn` + wait of /bin/true a second, on `threads` threads.
pub fn spawn_rate(threads: usize) -> f64 {
    const EACH: usize = 2_000;
    let started = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                for _ in 0..EACH {
                    // std uses posix_spawn when nothing forces fork.
                    std::process::Command::new("/bin/true").status().unwrap();
                }
            });
        }
    });
    (threads * EACH) as f64 / started.elapsed().as_secs_f64()
}
