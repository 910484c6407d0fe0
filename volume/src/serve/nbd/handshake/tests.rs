//! Negotiations, whole and broken.

use proptest::prelude::*;

use super::*;

fn export() -> Export {
    Export { name: "disk".into(), size: 12_345, read_only: false }
}

/// A negotiation after the greeting and the client's flags.
fn greeted() -> Handshake {
    let mut out = Vec::new();
    let mut handshake = Handshake::new(export(), &mut out);
    assert_eq!(out, b"NBDMAGICIHAVEOPT\0\x03");
    assert_eq!(handshake.take(&3u32.to_be_bytes(), &mut Vec::new()), Ok(Step::Took(4)));
    handshake
}

fn option(asked: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = OPTION_MAGIC.to_be_bytes().to_vec();
    bytes.extend(asked.to_be_bytes());
    bytes.extend((data.len() as u32).to_be_bytes());
    bytes.extend(data);
    bytes
}

fn go(name: &str, wishes: &[u16]) -> Vec<u8> {
    let mut data = text(name.as_bytes());
    data.extend((wishes.len() as u16).to_be_bytes());
    data.extend(wishes.iter().flat_map(|wish| wish.to_be_bytes()));
    data
}

fn queries(name: &str, queries: &[&str]) -> Vec<u8> {
    let mut data = text(name.as_bytes());
    data.extend((queries.len() as u32).to_be_bytes());
    data.extend(queries.iter().flat_map(|query| text(query.as_bytes())));
    data
}

/// The kinds of the answers in `out`, with their data.
fn answers(mut out: &[u8]) -> Vec<(u32, Vec<u8>)> {
    let mut found = Vec::new();
    while !out.is_empty() {
        let mut from = Fields(out);
        assert_eq!(from.u64(), Some(OPTION_REPLY_MAGIC));
        from.u32().unwrap();
        let (kind, len) = (from.u32().unwrap(), from.u32().unwrap());
        found.push((kind, from.bytes(len as usize).unwrap().to_vec()));
        out = from.0;
    }
    found
}

/// Asks one option; the kinds of its answers.
fn ask(handshake: &mut Handshake, asked: u32, data: &[u8]) -> Vec<u32> {
    let mut out = Vec::new();
    let message = option(asked, data);
    assert_eq!(handshake.take(&message, &mut out), Ok(Step::Took(message.len())), "{asked}");
    answers(&out).into_iter().map(|(kind, _)| kind).collect()
}

#[test]
fn a_client_gets_the_export_by_its_name_and_without_one() {
    for name in ["", "disk"] {
        let mut handshake = greeted();
        let (mut out, message) = (Vec::new(), option(option::GO, &go(name, &[info::BLOCK_SIZE])));
        let agreed = Agreed { structured: false, allocation: false };
        assert_eq!(handshake.take(&message, &mut out), Ok(Step::Serve(message.len(), agreed)));
        let answers = answers(&out);
        let mut size = vec![0, 0];
        size.extend(12_345u64.to_be_bytes());
        size.extend(0b110_1101u16.to_be_bytes());
        assert_eq!(answers[0], (answer::INFO, size));
        assert_eq!(answers[1], (answer::INFO, vec![0, 3, 0, 0, 0, 1, 0, 0, 16, 0, 2, 0, 0, 0]));
        assert_eq!(answers[2], (answer::ACK, Vec::new()));
    }
}

#[test]
fn another_name_is_unknown() {
    let mut handshake = greeted();
    assert_eq!(ask(&mut handshake, option::GO, &go("other", &[])), [answer::ERR_UNKNOWN]);
    assert_eq!(ask(&mut handshake, option::INFO, &go("other", &[])), [answer::ERR_UNKNOWN]);
    assert_eq!(handshake.take(&option(option::EXPORT_NAME, b"other"), &mut Vec::new()), Err(HandshakeError::NoSuchExport));
}

#[test]
fn the_list_is_the_one_export() {
    let mut out = Vec::new();
    greeted().take(&option(option::LIST, &[]), &mut out).unwrap();
    assert_eq!(answers(&out), [(answer::SERVER, b"\0\0\0\x04disk".to_vec()), (answer::ACK, Vec::new())]);
    assert_eq!(ask(&mut greeted(), option::LIST, b"x"), [answer::ERR_INVALID]);
}

#[test]
fn metadata_is_told_to_those_who_take_structure() {
    let mut handshake = greeted();
    let all = queries("", &["base:allocation"]);
    assert_eq!(ask(&mut handshake, option::SET_META_CONTEXT, &all), [answer::ERR_INVALID]);
    assert_eq!(ask(&mut handshake, option::STRUCTURED_REPLY, b"x"), [answer::ERR_INVALID]);
    assert_eq!(ask(&mut handshake, option::STRUCTURED_REPLY, &[]), [answer::ACK]);
    for (asked, names, found) in [
        (option::LIST_META_CONTEXT, &[][..], true),
        (option::LIST_META_CONTEXT, &["base:"], true),
        (option::LIST_META_CONTEXT, &["qemu:"], false),
        (option::SET_META_CONTEXT, &["base:"], false),
        (option::SET_META_CONTEXT, &[], false),
        (option::SET_META_CONTEXT, &["x-none:a", "base:allocation"], true),
    ] {
        let kinds = ask(&mut handshake, asked, &queries("disk", names));
        let expected: &[u32] = if found { &[answer::META_CONTEXT, answer::ACK] } else { &[answer::ACK] };
        assert_eq!(kinds, expected, "{asked} {names:?}");
    }
    assert_eq!(handshake.agreed(), Agreed { structured: true, allocation: true });
    // A choice that fails leaves nothing chosen.
    assert_eq!(ask(&mut handshake, option::SET_META_CONTEXT, &queries("other", &["base:allocation"])), [answer::ERR_UNKNOWN]);
    assert_eq!(handshake.agreed(), Agreed { structured: true, allocation: false });
}

#[test]
fn what_is_not_known_is_refused_and_passed_over() {
    let mut handshake = greeted();
    assert_eq!(ask(&mut handshake, option::STARTTLS, &[]), [answer::ERR_UNSUP]);
    assert_eq!(ask(&mut handshake, 11, &[]), [answer::ERR_UNSUP]);
    assert_eq!(ask(&mut handshake, 77, b"anything"), [answer::ERR_UNSUP]);
    let long = option(option::INFO, &vec![0; OPTION_BYTES_MAX + 1]);
    let mut out = Vec::new();
    assert_eq!(handshake.take(&long, &mut out), Ok(Step::Took(16)));
    assert_eq!(answers(&out), [(answer::ERR_TOO_BIG, Vec::new())]);
    assert_eq!(handshake.take(&long[16..20], &mut out), Ok(Step::Took(4)));
    assert_eq!(handshake.take(&long[20..], &mut out), Ok(Step::Took(OPTION_BYTES_MAX - 3)));
    assert_eq!(ask(&mut handshake, option::INFO, &go("", &[info::NAME])), [answer::INFO, answer::INFO, answer::INFO, answer::ACK]);
    assert_eq!(handshake.take(&option(option::ABORT, &[]), &mut Vec::new()), Ok(Step::Leave));
}

#[test]
fn a_client_that_never_ends_is_ended() {
    let mut handshake = greeted();
    let results: Vec<_> = (0..=OPTIONS_MAX).map(|_| handshake.take(&option(option::LIST, &[]), &mut Vec::new())).collect();
    assert_eq!(results.iter().filter(|result| result.is_ok()).count(), OPTIONS_MAX as usize);
    assert_eq!(results.last(), Some(&Err(HandshakeError::TooMany)));
    let mut head = option(option::LIST, &[]);
    head[12..].copy_from_slice(&u32::MAX.to_be_bytes());
    assert_eq!(greeted().take(&head, &mut Vec::new()), Err(HandshakeError::TooLong(u32::MAX)));
}

#[test]
fn flags_that_are_not_known_end_it() {
    for flags in [0u32, 2, 4, 7, u32::MAX] {
        let mut handshake = Handshake::new(export(), &mut Vec::new());
        assert_eq!(handshake.take(&flags.to_be_bytes(), &mut Vec::new()), Err(HandshakeError::Flags(flags)));
    }
}

#[test]
fn the_old_way_in_has_its_zeros() {
    for (flags, len) in [(1u32, 134), (3, 10)] {
        let mut handshake = Handshake::new(export(), &mut Vec::new());
        handshake.take(&flags.to_be_bytes(), &mut Vec::new()).unwrap();
        let mut out = Vec::new();
        let agreed = Agreed { structured: false, allocation: false };
        assert_eq!(handshake.take(&option(option::EXPORT_NAME, b"disk"), &mut out), Ok(Step::Serve(20, agreed)));
        assert_eq!(out.len(), len);
    }
}

/// Lets a client say all of `bytes`, which come in parts of `part`. What was answered, and how it ended.
fn say(bytes: &[u8], part: usize) -> (Vec<u8>, Option<Result<Step, HandshakeError>>) {
    let mut out = Vec::new();
    let mut handshake = Handshake::new(export(), &mut out);
    let (mut held, mut unused) = (Vec::new(), 0);
    for part in bytes.chunks(part) {
        held.extend(part);
        loop {
            let before = out.len();
            match handshake.take(&held[unused..], &mut out) {
                Ok(Step::More) => {
                    assert!(held.len() - unused < MESSAGE_BYTES_MAX, "a whole message is there");
                    break;
                }
                Ok(Step::Took(took)) => unused += took,
                end => return (out, Some(end)),
            }
            assert!(out.len() - before <= 4096 + 200, "answers are short");
        }
    }
    (out, None)
}

/// What clients may say: mostly options with data that is nearly right.
fn said() -> impl Strategy<Value = Vec<u8>> {
    let data = prop_oneof![
        proptest::collection::vec(any::<u8>(), 0..64),
        (".{0,3}|disk", proptest::collection::vec(0u16..5, 0..4)).prop_map(|(name, wishes)| go(&name, &wishes)),
        Just(queries("disk", &["base:allocation"])),
        Just(queries("", &["base:", "q"])),
        Just(Vec::new()),
    ];
    let message = prop_oneof![
        8 => (0u32..12, data).prop_map(|(asked, data)| option(asked, &data)),
        1 => proptest::collection::vec(any::<u8>(), 0..40),
    ];
    let flags = prop_oneof![8 => Just(3u32), 1 => any::<u32>()];
    (flags, proptest::collection::vec(message, 0..12)).prop_map(|(flags, messages)| {
        let mut bytes = flags.to_be_bytes().to_vec();
        bytes.extend(messages.concat());
        bytes
    })
}

proptest! {
    #[test]
    fn any_bytes_end_well_and_alike_in_whatever_parts_they_come(bytes in said(), part in 1usize..40) {
        let (whole, end) = say(&bytes, usize::MAX);
        let (parts, same) = say(&bytes, part);
        prop_assert_eq!(whole, parts);
        // Only how many bytes the last one took may differ, as it does not.
        prop_assert_eq!(end, same);
    }

    #[test]
    fn noise_ends_well(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let mut greeted = 3u32.to_be_bytes().to_vec();
        greeted.extend(&bytes);
        say(&bytes, 7);
        say(&greeted, 7);
    }
}
