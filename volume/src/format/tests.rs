//! What version 1 of each record looks like, byte for byte. A change of a hash here is a change of the format: what is stored would not be read any more.
//! The head's stands beside it.

use std::collections::BTreeMap;

use volley_jobspecs::ids::{SnapshotId, TenantId, VolumeId};

use super::content::{Content, MapRef};
use super::extent::PackRef;
use super::head::WrittenBy;
use super::head::tests::cluster;
use super::holding::Holding;
use super::log::{Change, RECORDS_FROM, Record, SegmentHeader};
use super::pack::PackWriter;
use super::page::{MapWriter, Page, Root};
use super::pin::Pin;
use super::seal::FamilyKey;
use super::snapshot::{Line, Snapshot};
use super::{BLOCK_BYTES, SIZE_MIN};

const VOLUME: VolumeId = VolumeId([1; 16]);

fn hash(bytes: &[u8]) -> String {
    blake3::hash(bytes).to_hex()[..32].to_owned()
}

/// Bytes that zstd leaves as they are: its frames may differ between its versions, which any version reads.
fn raw(blocks: usize) -> Vec<u8> {
    let mut state = 1u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    (0..blocks * BLOCK_BYTES).map(|_| next()).collect()
}

#[test]
fn packs_and_maps_stay() {
    let family = FamilyKey::new([2; 32]);
    let pack = PackRef { volume: VOLUME, epoch: 3, seq: 4, n: 5, salt: [6; 16] };
    let mut writer = PackWriter::new(&family, pack).unwrap();
    writer.extent(7, &raw(2)).unwrap();
    writer.hole(100, 50).unwrap();
    let (bytes, delta, pointers) = writer.finish().unwrap();
    assert_eq!(hash(&bytes[..delta.table.offset as usize]), "33ab26e899e4a124fd4c0286b6be56c3");

    let page = Page { packs: vec![pack], pointers: pointers[..1].to_vec() };
    assert_eq!(hash(&page.write(0).unwrap()), "7e438d58fcfaf33ca9715c612d0f464b");
    let object = MapRef { volume: VOLUME, epoch: 3, seq: 4, salt: [8; 16] };
    let at = MapWriter::new(&family, object).unwrap().page(0, &page).unwrap();
    let at = super::page::PageRef { frame: super::object::Frame { offset: 32, stored: 500, plain: 484, codec: 0 }, ..at };
    let root = Root { size: SIZE_MIN, pages: BTreeMap::from([(0, at)]) };
    assert_eq!(hash(&root.write().unwrap()), "2cc15a36d83a3d94990faec5b6501c58");
    let content = Content { size: SIZE_MIN, root: None, deltas: vec![delta] };
    assert_eq!(hash(&content.digest()), "99220ce4059a538b139176c81daa2197");
}

#[test]
fn the_log_stays() {
    let family = FamilyKey::new([2; 32]);
    let header = SegmentHeader { volume: VOLUME, epoch: 3, segment: 4, first_op: 5, salt: [6; 16] };
    assert_eq!(hash(&header.write(&family).unwrap()), "2172e06379dcf55b8bd9062a932c24f1");
    let mut bytes = Vec::new();
    let mut at = RECORDS_FROM;
    let write = (Change::Write { block: 9, blocks: 2 }, raw(2));
    let zero = Change::Zero { block: 1, blocks: 2, hole: false };
    for (change, data) in [write, (zero, vec![]), (Change::Resize { size: SIZE_MIN }, vec![]), (Change::Mark, vec![])] {
        let record = Record { change, op: 5, durable: 4, oldest: 3 };
        record.write(&header.key(&family).unwrap(), at, &[&data], &mut bytes).unwrap();
        at += record.bytes() as u32;
    }
    assert_eq!(hash(&bytes), "12ad7c9af5ff05bf934ce7bd0c0ddc39");
}

#[test]
fn small_records_stay() {
    let (id, family) = (SnapshotId([9; 16]), FamilyKey::new([2; 32]));
    let content = Content::empty(SIZE_MIN);
    let line = Line {
        id,
        volume: VOLUME,
        tenant: TenantId::new("acme").unwrap(),
        epoch: 1,
        seq: 2,
        generation: Some(3),
        written_by: WrittenBy::Guest,
        key: family.wrap(&cluster(), VOLUME, [4; 16]).unwrap(),
        created_ms: 5,
        parent: None,
        size: content.size,
        root: content.digest(),
    };
    assert_eq!(hash(&Snapshot { line, content }.write(&family, [6; 16]).unwrap()), "c257f237b1d9231ada8a5d89f74658dc");
    let pin = Pin { snapshot: id, owner: "j7".into(), until_ms: Some(8) };
    assert_eq!(hash(&pin.write().unwrap()), "52b0c301311a70ccfc264feddf2ffda3");
    let holding = Holding { volume: VOLUME, attach: [1; 16], epoch: 2, log_from: 1, ephemeral: None, boot: None };
    assert_eq!(hash(&holding.write().unwrap()), "83e5a108d21d11ea2ed1c383401d2dbc");
}
