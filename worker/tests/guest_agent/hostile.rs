//! A guest that says anything: the host neither panics, nor waits past a deadline, nor holds what it should not.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use volley_guest::files::Unpack;
use volley_jobspecs::wire::encode;
use volley_jobspecs::wire::guest::mux::{Channel, FRAME_BYTES_MAX, HEAD_BYTES};
use volley_jobspecs::wire::guest::resync::{FRAME_BYTES, From, Resync, Scanner};
use volley_jobspecs::wire::guest::{Answer, Ended, Exit, Get, Hello, PROTOCOL, Refusal, RefusalKind, Stats, Usage};
use volley_worker::guest::{FilesError, Guest, GuestError};

use crate::{LIMITS, shell};

const NONCE: [u8; 32] = [9; 32];
const WAIT: Duration = Duration::from_millis(300);

/// A connection whose other end the test plays.
fn pair() -> (Box<DuplexStream>, DuplexStream) {
    let (host, guest) = tokio::io::duplex(1 << 20);
    (Box::new(host), guest)
}

fn resync(nonce: [u8; 32]) -> Resync {
    Resync { nonce, attempt: 1, reseed: false }
}

fn frame(kind: u8, channel: u8, call: u32, body: &[u8]) -> Vec<u8> {
    let mut frame = vec![kind, channel];
    frame.extend_from_slice(&u16::try_from(body.len()).unwrap().to_le_bytes());
    frame.extend_from_slice(&call.to_le_bytes());
    frame.extend_from_slice(body);
    frame
}

fn answer(call: u32, answer: &Answer) -> Vec<u8> {
    frame(1, 0, call, &encode(answer))
}

fn hello(protocol: u32) -> Vec<u8> {
    let hello = Hello { protocol, build: String::new(), boot_id: None, kernel: String::new(), reseed_due: false, limits: true };
    [answer(1, &Answer::Hello(hello)), frame(6, 0, 1, &[])].concat()
}

/// Takes the host's frame, says some bytes, takes its first request, says others; and then nothing more.
async fn says(guest: &mut DuplexStream, first: &[u8], then: &[u8]) -> std::io::Result<std::convert::Infallible> {
    let mut frame = [0; FRAME_BYTES];
    guest.read_exact(&mut frame).await?;
    assert_eq!(Scanner::new(From::Host).feed(&frame).1, Some(resync(NONCE)));
    guest.write_all(first).await?;
    let mut request = [0; HEAD_BYTES];
    guest.read_exact(&mut request).await?;
    guest.read_exact(&mut vec![0; usize::from(request[2])]).await?;
    guest.write_all(then).await?;
    std::future::pending().await
}

/// What the host makes of a guest that says these bytes, and that it speaks this protocol.
async fn connected(first: &[u8], protocol: u32) -> Result<(Guest, DuplexStream), GuestError> {
    let (host, mut guest) = pair();
    let then = hello(protocol);
    let connected = tokio::select! {
        connected = Guest::connect(host, NONCE, false, WAIT) => connected,
        said = says(&mut guest, first, &then) => panic!("{said:?}"),
    };
    connected.map(|(session, _)| (session, guest))
}

async fn begun() -> (Guest, DuplexStream) {
    connected(&resync(NONCE).encode(From::Guest), PROTOCOL).await.unwrap()
}

#[tokio::test]
async fn nothing_is_believed_before_the_echo() {
    // What a sibling was told, its whole session, an echo of the frame as it came, half an echo; then the real one.
    let noise = [
        &resync([8; 32]).encode(From::Guest)[..],
        &hello(PROTOCOL),
        &resync(NONCE).encode(From::Host),
        &resync(NONCE).encode(From::Guest)[..FRAME_BYTES - 1],
        &[0xf7; 100_000],
    ]
    .concat();
    let echo = resync(NONCE).encode(From::Guest);
    let (session, mut guest) = connected(&[&noise[..], &echo].concat(), PROTOCOL).await.unwrap();
    drop(session);
    let mut rest = Vec::new();
    guest.read_to_end(&mut rest).await.unwrap();
    // Without the real one there is no session.
    assert!(matches!(connected(&noise, PROTOCOL).await, Err(GuestError::Silent { .. })));
    let wrong = Resync { attempt: 2, ..resync(NONCE) }.encode(From::Guest);
    assert!(matches!(connected(&wrong, PROTOCOL).await, Err(GuestError::Silent { .. })), "no try of the host's");
    assert!(matches!(connected(&[], PROTOCOL).await, Err(GuestError::Silent { .. })));
    assert!(matches!(connected(&echo, PROTOCOL + 1).await, Err(GuestError::Protocol { theirs }) if theirs == PROTOCOL + 1));
}

#[tokio::test]
async fn endless_noise_is_not_read_for_ever() {
    let (host, guest) = pair();
    let (_reader, mut writer) = tokio::io::split(guest);
    let noise = tokio::spawn(async move { while writer.write_all(&[1; 65536]).await.is_ok() {} });
    let connected = Guest::connect(host, NONCE, false, Duration::from_secs(60)).await;
    assert!(matches!(connected, Err(GuestError::Lost(_))), "{:?}", connected.err());
    noise.await.unwrap();
}

#[tokio::test]
async fn a_guest_that_hangs_up_or_breaks_the_rules_is_lost() {
    for (what, end) in [
        ("no frame", vec![0xee]),
        ("a call that is not open", answer(7, &Answer::Done)),
        ("too much", frame(3, 2, 2, &[0; FRAME_BYTES_MAX]).repeat(17)),
        ("an endless message", frame(2, 0, 2, &[0; FRAME_BYTES_MAX]).repeat(5)),
    ] {
        let (session, mut guest) = begun().await;
        let begin = Instant::now();
        let script = shell("true");
        let (ran, ()) = tokio::join!(session.exec(&script), async { guest.write_all(&end).await.unwrap() });
        assert!(matches!(ran, Err(GuestError::Lost(_))), "{what}: {ran:?}");
        assert!(matches!(session.stats().await, Err(GuestError::Lost(_))), "{what}");
        assert!(begin.elapsed() < Duration::from_secs(10));
    }
    let (session, guest) = begun().await;
    drop(guest);
    assert!(matches!(session.hello().await, Err(GuestError::Lost(_))));
}

#[tokio::test]
async fn answers_that_make_no_sense_fail_their_call_alone() {
    let ended =
        Ended { exit: Exit::Code(0), timed_out: false, oom_kills: 0, usage: Usage::default(), survivors: 0, disk_full: false, strays: 0 };
    let (session, mut guest) = begun().await;
    // Ended before it started; bytes that are no answer; a close without one; and then one that is right.
    let script = shell("true");
    let (ran, ()) = tokio::join!(session.exec(&script), async { guest.write_all(&answer(2, &Answer::Ended(ended))).await.unwrap() });
    assert!(matches!(ran, Err(GuestError::Nonsense { .. })));
    let (ran, ()) = tokio::join!(session.stats(), async { guest.write_all(&frame(1, 0, 3, b"\xff\xff")).await.unwrap() });
    assert!(matches!(ran, Err(GuestError::Nonsense { .. })));
    let (ran, ()) = tokio::join!(session.stats(), async { guest.write_all(&frame(6, 0, 4, &[])).await.unwrap() });
    assert!(matches!(ran, Err(GuestError::Nonsense { .. })));
    let red = Answer::Refused(Refusal::new(RefusalKind::System, "\x1b[31mred\nline"));
    let (ran, ()) = tokio::join!(session.thaw("/"), async { guest.write_all(&answer(5, &red)).await.unwrap() });
    assert_eq!(ran.unwrap_err().to_string(), "the machine's agent refused:  [31mred line", "a guest can't steer a terminal");
    let (ran, ()) = tokio::join!(session.freeze("/"), async {
        guest.write_all(&[answer(6, &Answer::Done), frame(6, 0, 6, &[])].concat()).await.unwrap();
    });
    ran.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_that_says_nothing_more_holds_nobody() {
    let (session, guest) = begun().await;
    let dir = tempfile::tempdir().unwrap();
    let opened = || OwnedFd::from(std::fs::File::open(dir.path()).unwrap());
    let how = Unpack { owner: None, mode_mask: 0o777, limits: LIMITS };
    let get = Get { path: "/".into(), limits: LIMITS };
    let begin = Instant::now();
    let got = session.get(get.clone(), opened(), how, WAIT).await;
    assert!(matches!(got, Err(FilesError::Guest(GuestError::Silent { .. }) | FilesError::Unpack(_))), "{got:?}");
    assert!(begin.elapsed() < Duration::from_secs(10));
    // Dropping the session ends what still waits in it.
    let (session, waits) = (std::sync::Arc::new(session), shell("true"));
    let other = session.clone();
    let waiting = tokio::spawn(async move { other.exec(&waits).await.map(|_| ()) });
    tokio::time::sleep(Duration::from_millis(50)).await;
    drop(guest);
    assert!(matches!(waiting.await.unwrap(), Err(GuestError::Lost(_))));
}

/// Mostly within the rules and with answers that can be read, so that the session gets far; calls 2 and 3 are open.
fn any_frame() -> impl Strategy<Value = Vec<u8>> {
    let ended = Ended {
        exit: Exit::Signal(9),
        timed_out: true,
        oom_kills: u64::MAX,
        usage: Usage::default(),
        survivors: 7,
        disk_full: true,
        strays: u32::MAX,
    };
    let refused = Answer::Refused(Refusal::new(RefusalKind::System, "\x1b[31mred"));
    let answers = [Answer::Started { pid: u32::MAX }, Answer::Ended(ended), Answer::Stats(Stats::default()), refused, Answer::Done];
    let said = (proptest::sample::select(answers.to_vec()), 2u32..4).prop_map(|(said, call)| answer(call, &said));
    let body = proptest::collection::vec(any::<u8>(), 1..200);
    let data = (2u8..4, 2u32..4, body.clone()).prop_map(|(channel, call, body)| frame(3, channel, call, &body));
    let ends = (5u8..7, 2u8..4, 2u32..4).prop_map(|(kind, channel, call)| frame(kind, channel, call, &[]));
    let wrong = (0u8..9, 0u8..5, 0u32..5, body).prop_map(|(kind, channel, call, body)| frame(kind, channel, call, &body));
    prop_oneof![10 => said, 20 => data, 2 => ends, 1 => wrong]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]
    #[test]
    fn no_bytes_of_a_guest_panic_or_hold_the_host(
        frames in proptest::collection::vec(any_frame(), 0..60),
        noise: Vec<u8>,
        cut in 0usize..20_000,
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
        runtime.block_on(async {
            let said = frames.concat();
            let said = [&said[..cut.min(said.len())], &noise[..]].concat();
            let (session, mut guest) = begun().await;
            let talk = async {
                // Let the calls be opened first.
                tokio::task::yield_now().await;
                let _ = guest.write_all(&said).await;
                drop(guest);
            };
            let script = shell("true");
            let calls = async {
                let stats = session.stats();
                let run = async {
                    if let Ok(command) = session.exec(&script).await {
                        let mut buffer = [0; 64];
                        while let Ok(1..) = command.read(Channel::Output, &mut buffer).await {}
                        let _ = command.ended().await;
                    }
                };
                tokio::join!(stats, run)
            };
            // Time passes by itself here: what waited for ever would hang the test.
            let _ = tokio::join!(calls, talk);
        });
    }
}
