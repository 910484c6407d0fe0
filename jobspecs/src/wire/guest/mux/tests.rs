//! Two ends held against each other, and one end held against anything.

use super::*;
use proptest::prelude::*;

/// Moves bytes from one end to the other until there are none, in pieces of `piece`.
fn carry(from: &mut Mux, to: &mut Mux, piece: usize) -> usize {
    let mut carried = 0;
    loop {
        let mut bytes = Vec::new();
        from.fill(&mut bytes, 64 * 1024);
        if bytes.is_empty() {
            return carried;
        }
        carried += bytes.len();
        for part in bytes.chunks(piece) {
            to.feed(part).expect("our own frames");
        }
    }
}

fn pair() -> (Mux, Mux) {
    (Mux::new(Side::Host), Mux::new(Side::Guest))
}

fn read_all(mux: &mut Mux, call: u32, channel: Channel) -> (Vec<u8>, Read) {
    let (mut all, mut buffer) = (Vec::new(), [0; 1000]);
    loop {
        match mux.read(call, channel, &mut buffer) {
            Read::Bytes(len) => all.extend_from_slice(&buffer[..len]),
            end => return (all, end),
        }
    }
}

#[test]
fn a_call_from_request_to_close() {
    let (mut host, mut guest) = pair();
    let call = host.open(b"run".to_vec()).unwrap();
    assert_eq!(host.write(call, Channel::Input, b"in"), Write::Bytes(2));
    host.end(call, Channel::Input);
    carry(&mut host, &mut guest, 3);
    assert_eq!(guest.accept(), Some((call, b"run".to_vec())));
    assert_eq!(read_all(&mut guest, call, Channel::Input), (b"in".to_vec(), Read::End));
    assert_eq!(guest.say(call, b"started".to_vec()), Said::Yes);
    assert_eq!(guest.write(call, Channel::Output, b"out"), Write::Bytes(3));
    guest.finish(call, b"ended".to_vec());
    assert_eq!(guest.write(call, Channel::Errors, b"late"), Write::Gone);
    carry(&mut guest, &mut host, 5);
    assert_eq!((guest.open_calls(), guest.is_flushed()), (0, true));
    assert_eq!(host.message(call), Some(b"started".to_vec()));
    assert_eq!(read_all(&mut host, call, Channel::Output), (b"out".to_vec(), Read::End));
    assert_eq!(read_all(&mut host, call, Channel::Errors), (Vec::new(), Read::End));
    assert!(!host.is_over(call));
    assert_eq!(host.message(call), Some(b"ended".to_vec()));
    assert!(host.is_over(call));
    host.give_up(call);
    assert_eq!((host.open_calls(), host.is_flushed()), (0, true));
}

#[test]
fn a_reader_that_stops_holds_up_its_own_channel_only() {
    let (mut host, mut guest) = pair();
    let (first, second) = (host.open(vec![1]).unwrap(), host.open(vec![2]).unwrap());
    carry(&mut host, &mut guest, 100);
    let (_, _) = (guest.accept(), guest.accept());
    let mut written = 0;
    while let Write::Bytes(len) = guest.write(first, Channel::Output, &[7; 10_000]) {
        written += len;
        carry(&mut guest, &mut host, 4096);
    }
    assert_eq!(written, WINDOW_BYTES as usize + SEND_BYTES_MAX);
    assert_eq!(guest.write(first, Channel::Errors, b"e"), Write::Bytes(1));
    guest.finish(second, b"done".to_vec());
    carry(&mut guest, &mut host, 4096);
    assert_eq!(read_all(&mut host, first, Channel::Errors).0, b"e");
    assert_eq!(host.message(second), Some(b"done".to_vec()));
    // Reading opens the window again.
    assert_eq!(read_all(&mut host, first, Channel::Output).0.len(), WINDOW_BYTES as usize);
    assert!(carry(&mut host, &mut guest, 100) > 0);
    carry(&mut guest, &mut host, 4096);
    assert_eq!(read_all(&mut host, first, Channel::Output).0.len(), SEND_BYTES_MAX);
}

#[test]
fn what_is_given_up_takes_no_room_and_ends() {
    let (mut host, mut guest) = pair();
    let (unsent, running) = (host.open(vec![0; 100_000]).unwrap(), host.open(vec![2]).unwrap());
    host.give_up(unsent);
    carry(&mut host, &mut guest, 100);
    assert_eq!(guest.accept(), Some((running, vec![2])), "the other one was never asked for");
    assert_eq!(guest.write(running, Channel::Output, &[1; 5000]), Write::Bytes(5000));
    carry(&mut guest, &mut host, 100);
    host.give_up(running);
    assert_eq!(read_all(&mut host, running, Channel::Output), (Vec::new(), Read::Gone));
    carry(&mut host, &mut guest, 100);
    assert!(guest.is_over(running));
    assert_eq!(guest.write(running, Channel::Output, b"x"), Write::Gone);
    guest.finish(running, b"late".to_vec());
    carry(&mut guest, &mut host, 100);
    assert_eq!((host.open_calls(), guest.open_calls()), (0, 0));
    // And the next one has the next number.
    let next = host.open(vec![3]).unwrap();
    carry(&mut host, &mut guest, 100);
    assert_eq!(guest.accept(), Some((next, vec![3])));
}

#[test]
fn a_call_given_up_in_the_middle_of_its_request_is_closed() {
    let (mut host, mut guest) = pair();
    let call = host.open(vec![0; 3 * FRAME_BYTES_MAX]).unwrap();
    let mut bytes = Vec::new();
    host.fill(&mut bytes, 1);
    guest.feed(&bytes).unwrap();
    host.give_up(call);
    carry(&mut host, &mut guest, 100);
    assert_eq!(guest.accept(), None);
    carry(&mut guest, &mut host, 100);
    assert_eq!((host.open_calls(), guest.open_calls()), (0, 0));
}

#[test]
fn as_many_orders_as_anybody_likes_wait_for_the_agent_and_break_nothing() {
    let (mut host, mut guest) = pair();
    let call = host.open(b"run".to_vec()).unwrap();
    let (mut said, mut took) = (0_u8, Vec::new());
    let mut say_all = |host: &mut Mux| {
        let before = said;
        while said < 200 && host.say(call, vec![said]) == Said::Yes {
            said += 1;
        }
        said - before
    };
    // The agent takes nothing: what it has room for, and what may wait here.
    assert_eq!(usize::from(say_all(&mut host)), MESSAGES_MAX - 1, "the request waits too");
    carry(&mut host, &mut guest, 7);
    assert_eq!(usize::from(say_all(&mut host)), MESSAGES_MAX);
    assert_eq!(carry(&mut host, &mut guest, 7), 0, "there is no room");
    assert_eq!(host.say(call, vec![1]), Said::Full);
    assert_eq!(guest.accept(), Some((call, b"run".to_vec())));
    while took.len() < 200 {
        took.extend(std::iter::from_fn(|| guest.message(call)).flatten());
        carry(&mut guest, &mut host, 7);
        say_all(&mut host);
        assert!(carry(&mut host, &mut guest, 7) > 0 || took.len() == 200);
    }
    assert_eq!(took, (0..200).collect::<Vec<u8>>());
    // A call with few costs no frame for it.
    let quiet = host.open(b"run".to_vec()).unwrap();
    host.say(quiet, vec![1]);
    carry(&mut host, &mut guest, 7);
    assert!(guest.accept().is_some() && guest.message(quiet).is_some());
    assert_eq!(carry(&mut guest, &mut host, 7), 0);
}

#[test]
fn an_agent_that_does_not_understand_says_so() {
    let (mut host, mut guest) = pair();
    let why = guest.feed(&one_frame(3, 1, 9, b"x")).unwrap_err();
    let mut out = Vec::new();
    put_over(&mut out, &why);
    assert_eq!(host.feed(&out), Err(Broken::Told { why: "a frame for call 9, which is not open".to_owned() }));
    let steers = one_frame(8, 0, 0, b"\x1b[2J\xff");
    assert_eq!(Mux::new(Side::Host).feed(&steers), Err(Broken::Told { why: " [2J ".to_owned() }));
}

fn one_frame(kind: u8, channel: u8, call: u32, body: &[u8]) -> Vec<u8> {
    let mut frame = vec![kind, channel];
    frame.extend_from_slice(&u16::try_from(body.len()).unwrap().to_le_bytes());
    frame.extend_from_slice(&call.to_le_bytes());
    frame.extend_from_slice(body);
    frame
}

#[test]
fn a_guest_that_breaks_the_rules_ends_its_session() {
    let cases: [(&str, Vec<Vec<u8>>); 12] = [
        ("an unknown kind", vec![vec![0x33]]),
        ("filler", vec![vec![super::super::resync::FILLER]]),
        ("what only a host says", vec![one_frame(7, 0, 1, &[])]),
        ("a call nobody opened", vec![one_frame(1, 0, 2, b"x")]),
        ("the host's own channel", vec![one_frame(3, 1, 1, b"x")]),
        ("a channel that was ended", vec![one_frame(5, 2, 1, &[]), one_frame(3, 2, 1, b"x")]),
        ("more than the window", vec![one_frame(3, 2, 1, &[0; FRAME_BYTES_MAX]); 17]),
        ("more than the host ever took", vec![one_frame(4, 1, 1, &1u32.to_le_bytes())]),
        ("room for more orders than there may be", vec![one_frame(4, 0, 1, &9u32.to_le_bytes())]),
        ("room for none", vec![one_frame(4, 0, 1, &0u32.to_le_bytes())]),
        ("a message without end", vec![one_frame(2, 0, 1, &[0; FRAME_BYTES_MAX]); 5]),
        ("more messages than a call has", vec![one_frame(1, 0, 1, b"x"); MESSAGES_MAX + 1]),
    ];
    for (what, frames) in cases {
        let mut host = Mux::new(Side::Host);
        host.open(vec![1]).unwrap();
        let fed: Vec<_> = frames.iter().map(|frame| host.feed(frame)).collect();
        assert!(fed.iter().any(Result::is_err), "{what}");
        assert!(fed[..fed.len() - 1].iter().all(Result::is_ok), "{what}: not before the last");
    }
    // Nothing that costs it nothing may come for ever, not even for a call that was given up.
    for endless in [one_frame(4, 1, 1, &[0; 4]), one_frame(1, 0, 1, &[]), one_frame(3, 2, 1, b"x"), one_frame(2, 0, 1, b"x")] {
        for given_up in [false, true] {
            let mut host = Mux::new(Side::Host);
            host.open(vec![1]).unwrap();
            if given_up {
                host.give_up(1);
            }
            assert!((0..1_000_000).any(|_| host.feed(&endless).is_err()), "{endless:?} {given_up}");
        }
    }
    let mut host = Mux::new(Side::Host);
    let call = host.open(vec![1]).unwrap();
    host.feed(&one_frame(6, 0, call, &[])).unwrap();
    assert!(host.feed(&one_frame(1, 0, call, b"x")).is_err(), "nothing comes behind a close");
}

/// Bytes held for the other side.
fn held(mux: &Mux) -> usize {
    let of_call = |call: &Call| {
        let pipes: usize = call.channels.values().map(|pipe| pipe.buffer.len()).sum();
        call.partial.len() + call.received.iter().map(Vec::len).sum::<usize>() + pipes
    };
    mux.calls.values().map(of_call).sum()
}

/// What a hostile guest may say: mostly frames that are within the rules, so that it gets far; some that are not, and noise.
fn hostile() -> impl Strategy<Value = Vec<u8>> {
    let right = (
        prop_oneof![6 => Just(3u8), 3 => Just(1), 2 => Just(2), 2 => Just(4), 1 => Just(5), 1 => Just(6)],
        2u8..4,
        1u32..3,
        0..FRAME_BYTES_MAX,
    )
        .prop_map(|(kind, channel, call, len)| match kind {
            // What the host wrote, and no more.
            4 => one_frame(kind, 1, call, &100u32.to_le_bytes()),
            5 | 6 => one_frame(kind, channel, call, &[]),
            _ => one_frame(kind, channel, call, &vec![9; len.max(1)]),
        });
    let wrong = (0u8..9, 0u8..5, 0u32..4, 0usize..40).prop_map(|(kind, channel, call, len)| one_frame(kind, channel, call, &vec![9; len]));
    prop_oneof![60 => right, 1 => wrong, 1 => proptest::collection::vec(any::<u8>(), 0..40)]
}

#[derive(Debug, Clone)]
enum Step {
    HostWrites(usize),
    GuestWrites(bool, usize),
    HostReads(bool),
    GuestReads,
    Carry(bool, usize),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (1usize..100_000).prop_map(Step::HostWrites),
        (any::<bool>(), 1usize..100_000).prop_map(|(errors, len)| Step::GuestWrites(errors, len)),
        any::<bool>().prop_map(Step::HostReads),
        Just(Step::GuestReads),
        (any::<bool>(), 1usize..40_000).prop_map(|(to_guest, piece)| Step::Carry(to_guest, piece)),
    ]
}

proptest! {
    #[test]
    fn a_hostile_guest_neither_panics_nor_fills_the_host(frames in proptest::collection::vec(hostile(), 0..120), piece in 1usize..50_000) {
        let mut host = Mux::new(Side::Host);
        let calls = [host.open(vec![1]).unwrap(), host.open(vec![2]).unwrap()];
        for call in calls {
            let _ = host.write(call, Channel::Input, &[8; 1000]);
        }
        host.fill(&mut Vec::new(), 1 << 20);
        let bytes = frames.concat();
        for (at, part) in bytes.chunks(piece).enumerate() {
            if host.feed(part).is_err() {
                break;
            }
            if at % 7 == 3 {
                host.give_up(calls[0]);
            }
            if at % 5 == 4 {
                let _ = (read_all(&mut host, calls[1], Channel::Output), host.message(calls[1]));
            }
            let mut out = Vec::new();
            host.fill(&mut out, 1 << 20);
            prop_assert!(out.len() <= 64 * 1024, "it answers little");
            let per_call = 2 * WINDOW_BYTES as usize + (MESSAGES_MAX + 1) * ANSWER_BYTES_MAX;
            prop_assert!(held(&host) <= 2 * per_call);
        }
    }

    #[test]
    fn noise_on_a_guest_does_no_harm(bytes: Vec<u8>, frames in proptest::collection::vec(hostile(), 0..20)) {
        let mut guest = Mux::new(Side::Guest);
        let _ = guest.feed(&frames.concat()).and_then(|()| guest.feed(&bytes));
        while let Some((call, _)) = guest.accept() {
            guest.finish(call, Vec::new());
        }
        let mut out = Vec::new();
        guest.fill(&mut out, 1 << 20);
    }

    #[test]
    fn bytes_arrive_whole_and_in_order(steps in proptest::collection::vec(step(), 0..80)) {
        let (mut host, mut guest) = pair();
        let call = host.open(vec![1]).unwrap();
        carry(&mut host, &mut guest, 9);
        guest.accept();
        // Per channel: the next byte written and the next one expected; they count up.
        let (mut written, mut read) = ([0u8; 3], [0u8; 3]);
        let write = |mux: &mut Mux, channel: Channel, at: &mut u8, len: usize| {
            let bytes: Vec<u8> = (0..len).map(|i| at.wrapping_add(i as u8)).collect();
            if let Write::Bytes(len) = mux.write(call, channel, &bytes) {
                *at = at.wrapping_add(len as u8);
            }
        };
        let check = |mux: &mut Mux, channel: Channel, at: &mut u8| {
            for byte in read_all(mux, call, channel).0 {
                assert_eq!(byte, *at);
                *at = at.wrapping_add(1);
            }
        };
        for step in steps {
            match step {
                Step::HostWrites(len) => write(&mut host, Channel::Input, &mut written[0], len),
                Step::GuestWrites(false, len) => write(&mut guest, Channel::Output, &mut written[1], len),
                Step::GuestWrites(true, len) => write(&mut guest, Channel::Errors, &mut written[2], len),
                Step::HostReads(false) => check(&mut host, Channel::Output, &mut read[1]),
                Step::HostReads(true) => check(&mut host, Channel::Errors, &mut read[2]),
                Step::GuestReads => check(&mut guest, Channel::Input, &mut read[0]),
                Step::Carry(true, piece) => { carry(&mut host, &mut guest, piece); }
                Step::Carry(false, piece) => { carry(&mut guest, &mut host, piece); }
            }
            prop_assert!(held(&host) <= 2 * WINDOW_BYTES as usize + SEND_BYTES_MAX && held(&guest) <= WINDOW_BYTES as usize + 2 * SEND_BYTES_MAX);
        }
        host.end(call, Channel::Input);
        guest.finish(call, vec![9]);
        for _ in 0..20 {
            carry(&mut host, &mut guest, 1 << 20);
            carry(&mut guest, &mut host, 1 << 20);
            check(&mut guest, Channel::Input, &mut read[0]);
            check(&mut host, Channel::Output, &mut read[1]);
            check(&mut host, Channel::Errors, &mut read[2]);
        }
        prop_assert_eq!((read[1], read[2]), (written[1], written[2]));
        prop_assert_eq!(host.message(call), Some(vec![9]));
        prop_assert!(host.is_over(call));
    }
}

/// What either end may do at any moment, with bytes on the way in both directions.
#[derive(Debug, Clone)]
enum Move {
    Open(usize),
    Say(usize),
    HostWrite(usize, usize),
    HostEnd(usize),
    GiveUp(usize),
    HostRead(usize),
    Accept,
    GuestSay(usize),
    GuestWrite(usize, usize),
    GuestRead(usize),
    Finish(usize),
    Abandon(usize),
    Send(bool, usize),
    Deliver(bool, usize),
}

fn any_move() -> impl Strategy<Value = Move> {
    let (call, len) = (0usize..6, 0usize..60_000);
    prop_oneof![
        2 => (0usize..40_000).prop_map(Move::Open),
        1 => call.clone().prop_map(Move::Say),
        2 => (call.clone(), len.clone()).prop_map(|(call, len)| Move::HostWrite(call, len)),
        1 => call.clone().prop_map(Move::HostEnd),
        1 => call.clone().prop_map(Move::GiveUp),
        2 => call.clone().prop_map(Move::HostRead),
        3 => Just(Move::Accept),
        1 => call.clone().prop_map(Move::GuestSay),
        3 => (call.clone(), len.clone()).prop_map(|(call, len)| Move::GuestWrite(call, len)),
        2 => call.clone().prop_map(Move::GuestRead),
        1 => call.clone().prop_map(Move::Finish),
        1 => call.prop_map(Move::Abandon),
        6 => (any::<bool>(), len.clone()).prop_map(|(to_guest, len)| Move::Send(to_guest, len)),
        8 => (any::<bool>(), len).prop_map(|(to_guest, len)| Move::Deliver(to_guest, len)),
    ]
}

/// Both ends, and what is on the way.
struct World {
    host: Mux,
    guest: Mux,
    to_guest: VecDeque<u8>,
    to_host: VecDeque<u8>,
    /// Calls the host opened, and those the guest took up.
    opened: Vec<u32>,
    accepted: Vec<u32>,
}

impl World {
    fn send(&mut self, to_guest: bool, len: usize) {
        let (from, way) = if to_guest { (&mut self.host, &mut self.to_guest) } else { (&mut self.guest, &mut self.to_host) };
        let mut out = Vec::new();
        from.fill(&mut out, len);
        way.extend(out);
    }

    fn deliver(&mut self, to_guest: bool, len: usize) {
        let (to, way) = if to_guest { (&mut self.guest, &mut self.to_guest) } else { (&mut self.host, &mut self.to_host) };
        let bytes: Vec<u8> = way.drain(..len.min(way.len())).collect();
        to.feed(&bytes).expect("neither end breaks the rules");
    }

    fn make(&mut self, step: Move) {
        let host_call = |opened: &[u32], at: usize| opened.get(at).copied().unwrap_or(99);
        match step {
            Move::Open(len) => self.opened.extend(self.host.open(vec![1; len])),
            Move::Say(at) => {
                self.host.say(host_call(&self.opened, at), vec![2; 3]);
            }
            Move::HostWrite(at, len) => drop(self.host.write(host_call(&self.opened, at), Channel::Input, &vec![3; len])),
            Move::HostEnd(at) => self.host.end(host_call(&self.opened, at), Channel::Input),
            Move::GiveUp(at) => self.host.give_up(host_call(&self.opened, at)),
            Move::HostRead(at) => {
                let call = host_call(&self.opened, at);
                let _ = (read_all(&mut self.host, call, Channel::Output), self.host.message(call));
            }
            Move::Accept => self.accepted.extend(self.guest.accept().map(|(call, _)| call)),
            Move::GuestSay(at) => {
                self.guest.say(host_call(&self.accepted, at), vec![4; 3]);
            }
            Move::GuestWrite(at, len) => drop(self.guest.write(host_call(&self.accepted, at), Channel::Output, &vec![5; len])),
            Move::GuestRead(at) => drop(read_all(&mut self.guest, host_call(&self.accepted, at), Channel::Input)),
            Move::Finish(at) => self.guest.finish(host_call(&self.accepted, at), vec![6; 9]),
            Move::Abandon(at) => self.guest.abandon_others(host_call(&self.accepted, at)),
            Move::Send(to_guest, len) => self.send(to_guest, len),
            Move::Deliver(to_guest, len) => self.deliver(to_guest, len),
        }
    }

    /// Nothing new is wanted: everything that was begun must end.
    fn settle(&mut self) {
        for _ in 0..200 {
            for to_guest in [true, false] {
                self.send(to_guest, 100_000);
                self.deliver(to_guest, usize::MAX);
            }
            while let Some((call, _)) = self.guest.accept() {
                self.accepted.push(call);
            }
            for call in self.accepted.clone() {
                self.guest.finish(call, vec![7]);
            }
            for call in self.opened.clone() {
                let _ = (read_all(&mut self.host, call, Channel::Output), self.host.message(call));
                if self.host.is_over(call) {
                    self.host.give_up(call);
                }
            }
        }
    }
}

proptest! {
    #[test]
    fn whatever_crosses_on_the_way_every_call_ends(steps in proptest::collection::vec(any_move(), 0..150)) {
        let (host, guest) = pair();
        let way = VecDeque::new();
        let mut world = World { host, guest, to_guest: way.clone(), to_host: way, opened: Vec::new(), accepted: Vec::new() };
        for step in steps {
            // At most as many as a session takes is the host's own rule.
            if !matches!(step, Move::Open(_)) || world.opened.len() < 6 {
                world.make(step);
            }
        }
        world.settle();
        prop_assert_eq!((world.host.open_calls(), world.guest.open_calls()), (0, 0));
        prop_assert!(world.host.is_flushed() && world.guest.is_flushed());
    }
}
