//! What is asked on a connection, and what is not allowed to happen whatever is asked.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;

use proptest::prelude::*;
use volley_volume::serve::nbd::{ServeError, serve, wire};
use wire::{command, command_flag};

use crate::client::{Client, negotiation};
use crate::device::FileDevice;
use crate::{patterns, soon};

const MIB: u64 = 1 << 20;

struct World {
    device: Arc<FileDevice>,
    client: Client,
    server: JoinHandle<Result<(), ServeError>>,
}

fn serving(device: FileDevice) -> (Arc<FileDevice>, UnixStream, JoinHandle<Result<(), ServeError>>) {
    let device = Arc::new(device);
    let (ours, theirs) = UnixStream::pair().unwrap();
    let served = Arc::clone(&device);
    let server = std::thread::spawn(move || serve(&theirs, &*served, "disk"));
    (device, ours, server)
}

fn world(device: FileDevice, structured: bool) -> World {
    let (device, stream, server) = serving(device);
    World { device, client: Client::over(stream, structured), server }
}

impl World {
    fn leave(mut self) -> Result<(), ServeError> {
        self.client.send(command::DISC, 0, 0, 0, &[]);
        self.server.join().unwrap()
    }
}

#[derive(Debug, Clone)]
enum Op {
    Read(u64, u32, bool),
    Write(u64, u32, u8, bool),
    Zero(u64, u32, bool, bool),
    Trim(u64, u32),
    Status(u64, u32),
    Flush,
}

fn ops(size: u64) -> impl Strategy<Value = Vec<Op>> {
    let range = prop_oneof![
        (0..size, 0u32..20_000),
        (0..size, 0u32..700_000),
        (0..size / 4096, 1u32..20).prop_map(|(at, len)| (at * 4096, len * 4096)),
    ];
    let range = range.prop_map(move |(at, len)| (at, len.min((size - at) as u32)));
    let op = prop_oneof![
        (range.clone(), any::<bool>()).prop_map(|((at, len), df)| Op::Read(at, len, df)),
        (range.clone(), any::<u8>(), any::<bool>()).prop_map(|((at, len), seed, fua)| Op::Write(at, len, seed, fua)),
        (range.clone(), any::<bool>(), any::<bool>()).prop_map(|((at, len), hole, fua)| Op::Zero(at, len, hole, fua)),
        range.clone().prop_map(|(at, len)| Op::Trim(at, len)),
        range.prop_map(|(at, len)| Op::Status(at, len)),
        Just(Op::Flush),
    ];
    proptest::collection::vec(op, 1..40)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Cold ranges are cold for the one who asks whether it is ready, and there at once for the one who waits.
    #[test]
    fn a_device_is_an_array(ops in ops(2 * MIB + 100), structured: bool, cold in proptest::option::of(0u64..2 * MIB)) {
        let size = 2 * MIB + 100;
        let mut w = world(FileDevice::new(size), structured);
        let mut model = vec![0u8; size as usize];
        let stop = Arc::new(std::sync::atomic::AtomicBool::new(false));
        let warmer = {
            let (device, stop) = (Arc::clone(&w.device), Arc::clone(&stop));
            // Whatever waits is served soon, and much is asked for before that.
            std::thread::spawn(move || while !stop.load(Ordering::SeqCst) {
                std::thread::sleep(std::time::Duration::from_millis(1));
                device.warm();
            })
        };
        for op in &ops {
            match *op {
                Op::Read(at, len, df) => {
                    let flags = if df && structured { command_flag::DF } else { 0 };
                    if let Some(cold) = cold {
                        w.device.chill(cold..cold + 300_000);
                    }
                    let reply = w.client.ask(command::READ, flags, at, len, &[]);
                    prop_assert_eq!(reply.error, 0);
                    prop_assert!(flags == 0 || reply.data.len() <= 1);
                    prop_assert!(reply.bytes() == model[at as usize..][..len as usize], "{:?}", op);
                }
                Op::Write(at, len, seed, fua) => {
                    w.device.warm();
                    let bytes = patterns(at, len as usize, seed);
                    model[at as usize..][..len as usize].copy_from_slice(&bytes);
                    prop_assert_eq!(w.client.ask(command::WRITE, u16::from(fua), at, len, &bytes).error, 0);
                }
                Op::Zero(at, len, hole, fua) => {
                    w.device.warm();
                    let flags = u16::from(fua) | if hole { 0 } else { command_flag::NO_HOLE };
                    model[at as usize..][..len as usize].fill(0);
                    prop_assert_eq!(w.client.ask(command::WRITE_ZEROES, flags, at, len, &[]).error, 0);
                }
                Op::Trim(at, len) => {
                    w.device.warm();
                    model[at as usize..][..len as usize].fill(0);
                    prop_assert_eq!(w.client.ask(command::TRIM, 0, at, len, &[]).error, 0);
                }
                Op::Status(at, len) if structured && len > 0 => {
                    let reply = w.client.ask(command::BLOCK_STATUS, 0, at, len, &[]);
                    let mut from = at as usize;
                    for (len, flags) in &reply.extents {
                        let zeros = model[from..from + *len as usize].iter().all(|byte| *byte == 0);
                        prop_assert!(*flags == 0 || zeros);
                        from += *len as usize;
                    }
                    prop_assert_eq!(from, (at + u64::from(len)) as usize);
                }
                Op::Status(..) => {}
                Op::Flush => prop_assert_eq!(w.client.ask(command::FLUSH, 0, 0, 0, &[]).error, 0),
            }
        }
        stop.store(true, Ordering::SeqCst);
        warmer.join().unwrap();
        prop_assert!(w.device.bytes(0, size as usize) == model);
        prop_assert!(w.leave().is_ok());
    }

    /// Noise ends a connection and nothing else: the server neither panics nor waits nor changes what was not written to.
    #[test]
    fn noise_ends_well(noise in proptest::collection::vec(any::<u8>(), 0..300), structured: bool, begins: bool, command in 0u16..10, flags in 0u16..32) {
        let (device, mut stream, server) = serving(FileDevice::new(MIB));
        let mut said = if begins { negotiation(structured) } else { Vec::new() };
        if begins {
            said.extend(wire::RequestHead { flags, command, cookie: 1, offset: 3, len: 70 }.encode());
        }
        said.extend(&noise);
        stream.write_all(&said).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let _ = server.join().unwrap();
        prop_assert!(device.bytes(1024, MIB as usize - 1024).iter().all(|byte| *byte == 0));
    }
}

#[test]
fn a_cold_read_blocks_neither_warm_ones_nor_writes() {
    for structured in [true, false] {
        let mut w = world(FileDevice::new(4 * MIB), structured);
        assert_eq!(w.client.write(0, &patterns(0, MIB as usize, 1)), 0);
        w.device.chill(0..4096);
        let cold = w.client.send(command::READ, 0, 100, 200, &[]);
        soon("the cold read", || w.device.waited.load(Ordering::SeqCst) == 1);
        assert_eq!(w.client.write(8192, &[7; 4096]), 0);
        assert_eq!(w.client.read(8192, 4096).bytes(), [7; 4096]);
        assert_eq!(w.client.ask(command::FLUSH, 0, 0, 0, &[]).error, 0);
        w.device.warm();
        let mut simple = [0; 16];
        if structured {
            let (cookie, reply) = w.client.next(&mut BTreeMap::new());
            assert_eq!((cookie, reply.bytes()), (cold, patterns(100, 200, 1)));
        } else {
            let mut data = [0; 200];
            io::Read::read_exact(&mut w.client.stream, &mut simple).unwrap();
            io::Read::read_exact(&mut w.client.stream, &mut data).unwrap();
            assert_eq!((wire::decode_simple_reply(&simple), data.to_vec()), (Some((cold, 0)), patterns(100, 200, 1)));
        }
        w.leave().unwrap();
    }
}

#[test]
fn a_read_that_gets_cold_on_the_way_is_whole() {
    let mut w = world(FileDevice::new(4 * MIB), true);
    let bytes = patterns(0, 2 * MIB as usize, 3);
    assert_eq!(w.client.write(0, &bytes), 0);
    w.device.chill(MIB..MIB + 4096);
    let cookie = w.client.send(command::READ, 0, 10, 2 * MIB as u32 - 10, &[]);
    // Not before the parts in front of it were taken.
    let device = Arc::clone(&w.device);
    let warming = std::thread::spawn(move || {
        soon("the cold part", || device.waited.load(Ordering::SeqCst) > 0);
        device.warm();
    });
    let (replied, reply) = w.client.next(&mut BTreeMap::new());
    warming.join().unwrap();
    assert_eq!((replied, reply.error), (cookie, 0));
    assert!(reply.bytes() == bytes[10..]);
    w.leave().unwrap();
}

#[test]
fn changes_of_a_block_at_once_lose_nothing() {
    for round in 0..10u8 {
        let mut w = world(FileDevice::new(MIB), true);
        w.device.chill(0..8192);
        // Each of them writes a part of a block that has to be read first, so all wait; and whole blocks among them.
        let mut model = vec![0; 16_384];
        let mut asked = 0;
        for i in 0..16u64 {
            let (offset, len) = if i % 5 == 4 { (4096 * (i % 3), 4096) } else { (i * 512, 512) };
            let bytes = patterns(offset, len, round.wrapping_add(i as u8 + 1));
            model[offset as usize..][..len].copy_from_slice(&bytes);
            w.client.send(command::WRITE, (i % 2) as u16, offset, len as u32, &bytes);
            asked += 1;
        }
        for (command, offset, len) in [(command::WRITE_ZEROES, 700, 100), (command::TRIM, 4000, 200)] {
            model[offset as usize..][..len].fill(0);
            w.client.send(command, 0, offset, len as u32, &[]);
            asked += 1;
        }
        // All of them were taken before this is, and nearly all wait.
        let read = w.client.send(command::READ, 0, MIB - 1, 1, &[]);
        while w.client.next(&mut BTreeMap::new()).0 != read {
            asked -= 1;
        }
        assert!(asked > 10);
        w.device.warm();
        for _ in 0..asked {
            assert_eq!(w.client.next(&mut BTreeMap::new()).1.error, 0);
        }
        assert!(w.device.bytes(0, 16_384) == model, "round {round}");
        w.leave().unwrap();
    }
}

#[test]
fn a_client_that_asks_and_asks_waits_and_gets_all() {
    let mut w = world(FileDevice::new(4 * MIB), true);
    assert_eq!(w.client.write(0, &patterns(0, 4 * MIB as usize, 5)), 0);
    w.device.chill(0..4 * MIB);
    let mut stream = w.client.stream.try_clone().unwrap();
    let asking = std::thread::spawn(move || {
        for cookie in 1000..3000u64 {
            let offset = cookie * 512 % (4 * MIB);
            let len = 512.min(4 * MIB - offset) as u32;
            stream.write_all(&wire::RequestHead { flags: 0, command: command::READ, cookie, offset, len }.encode()).unwrap();
        }
    });
    soon("some of them", || w.device.waited.load(Ordering::SeqCst) == 16);
    w.device.warm();
    let mut replied: Vec<u64> = (0..2000)
        .map(|_| {
            let (cookie, reply) = w.client.next(&mut BTreeMap::new());
            assert!(reply.bytes() == patterns(cookie * 512 % (4 * MIB), 512, 5));
            cookie
        })
        .collect();
    asking.join().unwrap();
    replied.sort_unstable();
    assert_eq!(replied, (1000..3000).collect::<Vec<_>>());
    w.leave().unwrap();
}

#[test]
fn errors_are_told_with_their_numbers() {
    for structured in [true, false] {
        let mut w = world(FileDevice::new(MIB), structured);
        for (kind, number) in [
            (io::ErrorKind::StorageFull, 28),
            (io::ErrorKind::InvalidInput, 22),
            (io::ErrorKind::ReadOnlyFilesystem, 1),
            (io::ErrorKind::StaleNetworkFileHandle, 108),
            (io::ErrorKind::TimedOut, 5),
        ] {
            w.device.fail(Some(kind));
            assert_eq!(w.client.read(0, 512).error, number);
            assert_eq!(w.client.write(0, &[1; 700_000]), number);
            assert_eq!(w.client.ask(command::TRIM, 0, 0, 512, &[]).error, number);
            assert_eq!(w.client.ask(command::WRITE_ZEROES, 1, 0, 4096, &[]).error, number);
            if structured {
                assert_eq!(w.client.ask(command::BLOCK_STATUS, 0, 0, 512, &[]).error, number);
            }
            // The same where it may wait.
            w.device.chill(0..4096);
            w.device.warm();
        }
        w.device.fail(None);
        assert_eq!(w.client.write(0, &[1; 512]), 0);
        w.leave().unwrap();
    }
}

#[test]
fn durable_is_durable_or_an_error() {
    let mut w = world(FileDevice::new(MIB), true);
    let flushes = |w: &World| w.device.flushes.load(Ordering::SeqCst);
    for (command, bytes) in [(command::WRITE, &[1; 4096][..]), (command::WRITE_ZEROES, &[]), (command::TRIM, &[])] {
        let before = flushes(&w);
        assert_eq!(w.client.ask(command, 0, 0, 4096, bytes).error, 0);
        assert_eq!(flushes(&w), before);
        assert_eq!(w.client.ask(command, command_flag::FUA, 0, 4096, bytes).error, 0);
        assert_eq!(flushes(&w), before + 1);
        w.device.fail_flushes(true);
        assert_eq!(w.client.ask(command, command_flag::FUA, 0, 4096, bytes).error, 5);
        w.device.fail_flushes(false);
    }
    w.device.fail_flushes(true);
    assert_eq!(w.client.ask(command::FLUSH, 0, 0, 0, &[]).error, 5);
    w.leave().unwrap();
}

#[test]
fn wrong_requests_are_refused_and_the_next_is_served() {
    let mut w = world(FileDevice::new(MIB), true);
    assert_eq!(w.client.ask(command::WRITE, 0, MIB - 1, 700, &[1; 700]).error, 28);
    assert_eq!(w.client.ask(command::WRITE, 1 << 9, 0, 700, &[1; 700]).error, 22);
    assert_eq!(w.client.read(MIB - 1, 2).error, 22);
    assert_eq!(w.client.read(0, 33 << 20).error, 22);
    assert_eq!(w.client.ask(99, 0, 0, 0, &[]).error, 22);
    let long = vec![1; (32 << 20) + 1];
    assert_eq!(w.client.write(0, &long), 22);
    assert_eq!(w.device.bytes(0, 700), [0; 700]);
    assert_eq!(w.client.read(0, 1).bytes(), [0]);
    w.leave().unwrap();
    let mut w = world(FileDevice::read_only(MIB), true);
    assert_eq!(w.client.write(0, &[1; 70_000]), 1);
    assert_eq!(w.client.ask(command::TRIM, 0, 0, 1, &[]).error, 1);
    assert_eq!((w.client.flags & 2, w.client.read(0, 1).bytes()), (2, vec![0]));
    w.leave().unwrap();
}

#[test]
fn a_client_that_goes_in_the_middle_of_a_write_is_gone() {
    for cold in [false, true] {
        let mut w = world(FileDevice::new(MIB), true);
        if cold {
            w.device.chill(0..4096);
        }
        let head = wire::RequestHead { flags: 0, command: command::WRITE, cookie: 1, offset: 5, len: 9_000 };
        w.client.stream.write_all(&head.encode()).unwrap();
        w.client.stream.write_all(&[1; 100]).unwrap();
        drop(w.client);
        w.server.join().unwrap().unwrap();
        assert_eq!(w.device.bytes(0, 10_000), [0; 10_000]);
    }
}

#[test]
fn a_client_that_leaves_has_its_replies() {
    let mut w = world(FileDevice::new(MIB), true);
    w.device.chill(0..4096);
    let cookie = w.client.send(command::WRITE, 0, 1, 10, &[9; 10]);
    w.client.send(command::DISC, 0, 0, 0, &[]);
    w.device.warm();
    assert_eq!(w.client.next(&mut BTreeMap::new()).0, cookie);
    w.server.join().unwrap().unwrap();
    assert_eq!(w.device.bytes(1, 10), [9; 10]);
}
