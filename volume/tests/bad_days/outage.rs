//! S3 is away while disks are written: writes wait, nothing fails, and every byte is there afterwards.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use volley_volume::device::Device;
use volley_volume::format::head::FlushMode;
use volley_volume::{Limits, Volume};

use crate::support::{MIB, World, id, new, noise, opener};
use crate::{accept, read};

/// Bytes of a write, and of its place.
const PIECE: usize = 64 << 10;
/// Writers of each volume.
const WRITERS: u64 = 2;
/// Places of each writer.
const PLACES: u64 = 64;
const SIZE: u64 = WRITERS * PLACES * PIECE as u64;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Pass,
    /// Connections are closed at once.
    Refuse,
    /// They are taken, and nobody says anything.
    Stall,
}

/// A way to S3 that can be closed.
struct Proxy {
    address: SocketAddr,
    way: Arc<Mutex<(Way, Vec<TcpStream>)>>,
}

impl Proxy {
    fn new(server: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let way = Arc::new(Mutex::new((Way::Pass, Vec::new())));
        let shared = Arc::clone(&way);
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let mut way = shared.lock().unwrap();
                match way.0 {
                    Way::Refuse => {}
                    Way::Stall => way.1.push(client),
                    Way::Pass => {
                        let Ok(upstream) = TcpStream::connect(server) else { continue };
                        way.1.extend([client.try_clone().unwrap(), upstream.try_clone().unwrap()]);
                        pass(client.try_clone().unwrap(), upstream.try_clone().unwrap());
                        pass(upstream, client);
                    }
                }
            }
        });
        Self { address, way }
    }

    /// Whatever is under way is cut.
    fn set(&self, way: Way) {
        let mut now = self.way.lock().unwrap();
        now.0 = way;
        now.1.drain(..).for_each(|stream| drop(stream.shutdown(Shutdown::Both)));
    }
}

fn pass(mut from: TcpStream, mut to: TcpStream) {
    std::thread::spawn(move || {
        let mut buffer = vec![0; 64 << 10];
        while let Ok(count @ 1..) = from.read(&mut buffer) {
            if to.write_all(&buffer[..count]).is_err() {
                break;
            }
        }
        let _ = to.shutdown(Shutdown::Both);
        let _ = from.shutdown(Shutdown::Both);
    });
}

/// Writes, flushes and reads back until it is told to stop; returns which write each place has.
fn writes(volume: &Volume, writer: u64, stop: &AtomicBool, done: &AtomicU64, longest: &AtomicU64) -> Vec<u64> {
    let mut last = vec![0; PLACES as usize];
    for n in 1.. {
        if stop.load(Ordering::SeqCst) {
            break;
        }
        let place = n * 29 % PLACES;
        let at = (writer * PLACES + place) * PIECE as u64;
        let begun = Instant::now();
        volume.write(at, &noise(PIECE, n * 2 + writer), false).unwrap();
        last[place as usize] = n;
        if n % 16 == 0 {
            volume.flush().unwrap();
        }
        longest.fetch_max(begun.elapsed().as_millis() as u64, Ordering::SeqCst);
        done.fetch_add(1, Ordering::SeqCst);
        let back = n * 31 % PLACES;
        let of = last[back as usize];
        let expected = if of == 0 { vec![0; 4096] } else { noise(4096, of * 2 + writer) };
        assert!(read(volume, (writer * PLACES + back) * PIECE as u64, 4096) == expected);
    }
    last
}

/// Every place has what its writer wrote there last.
fn check(volume: &Volume, last: &[Vec<u64>]) {
    for (writer, last) in (0..).zip(last) {
        for (place, n) in (0..).zip(last) {
            let found = read(volume, (writer * PLACES + place) * PIECE as u64, PIECE);
            let expected = if *n == 0 { vec![0; PIECE] } else { noise(PIECE, n * 2 + writer) };
            assert!(found == expected, "{}, writer {writer}, place {place}, write {n}", volume.id());
        }
    }
}

/// Writes are under way, S3 goes for `away` in each of two ways, and comes back.
fn s3_is_away_under_load(mut world: World, away: Duration) {
    let proxy = Proxy::new(world.server());
    let (apart, _) = world.host("apart", Limits::default());
    world.through(proxy.address);
    let limits = || Limits {
        commit_every: Duration::from_millis(200),
        commit_bytes: 2 * MIB,
        dirty_bytes_max: 4 * MIB,
        log_keep_bytes: 0,
        cache_bytes: 1 << 20,
        ..Limits::default()
    };
    let (host, _) = world.host("a", limits());
    let volumes = [(1, FlushMode::Local), (2, FlushMode::S3)].map(|(volume, flush)| {
        host.create(new(id(volume), SIZE, flush)).unwrap();
        host.attach(id(volume), &opener(volume)).unwrap()
    });
    let (stop, done, longest) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    let wait = |what: &str, holds: &dyn Fn() -> bool| {
        let begun = Instant::now();
        while !holds() {
            assert!(begun.elapsed() < Duration::from_secs(180), "{what}");
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    let last: Vec<Vec<u64>> = std::thread::scope(|scope| {
        let writers: Vec<_> = volumes
            .iter()
            .flat_map(|volume| (0..WRITERS).map(move |writer| (volume, writer)))
            .map(|(volume, writer)| {
                let (stop, done, longest) = (&stop, &done, &longest);
                scope.spawn(move || writes(volume, writer, stop, done, longest))
            })
            .collect();
        for way in [Way::Refuse, Way::Stall] {
            let before = done.load(Ordering::SeqCst);
            wait("something is written", &|| done.load(Ordering::SeqCst) > before + 100);
            longest.store(0, Ordering::SeqCst);
            proxy.set(way);
            std::thread::sleep(away);
            let stalled = done.load(Ordering::SeqCst);
            std::thread::sleep(Duration::from_millis(200));
            assert_eq!(done.load(Ordering::SeqCst), stalled, "writes wait when much waits to be committed");
            proxy.set(Way::Pass);
            wait("it goes on", &|| done.load(Ordering::SeqCst) > stalled + 100);
            let longest = Duration::from_millis(longest.load(Ordering::SeqCst));
            println!("away for {away:?}: a write took up to {longest:?}");
            assert!(longest > away / 2, "nobody has waited: {longest:?}");
        }
        stop.store(true, Ordering::SeqCst);
        writers.into_iter().map(|writer| writer.join().unwrap()).collect()
    });
    println!("{} writes, none failed", done.load(Ordering::SeqCst));
    for (at, volume) in volumes.into_iter().enumerate() {
        let of = &last[at * WRITERS as usize..(at + 1) * WRITERS as usize];
        check(&volume, of);
        let volume_id = volume.id();
        accept(&world, volume, 0);
        let elsewhere = apart.attach(volume_id, &opener(9)).unwrap();
        check(&elsewhere, of);
        elsewhere.detach().unwrap();
        apart.verify(volume_id, true).unwrap();
    }
}

fn away() -> Duration {
    Duration::from_secs(std::env::var("OUTAGE_SECS").ok().and_then(|secs| secs.parse().ok()).unwrap_or(3))
}

#[test]
fn an_outage_of_the_embedded_server() {
    s3_is_away_under_load(World::new(), away());
}

#[test]
fn an_outage_of_seaweedfs() {
    let Some(world) = World::on_seaweedfs() else { return };
    s3_is_away_under_load(world, away());
}
