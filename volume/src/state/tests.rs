//! Random operations on a disk against a plain array: everything pure together, with a log and a store in memory.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use proptest::prelude::*;
use volley_jobspecs::ids::VolumeId;

use super::commit::{Item, Packs, cut, taken_up, takes_up, wants_checkpoint};
use super::map::Map;
use super::overlay::{Overlay, Place, Run};
use super::scan::Scan;
use crate::format::content::{BODIES_BYTES_MAX, Content, MapRef};
use crate::format::extent::PackRef;
use crate::format::log::{Change, LogPlace, Record, SegmentHeader, open_block};
use crate::format::object::slice;
use crate::format::pack::{open_extent, open_table};
use crate::format::page::{MapWriter, Page, Root};
use crate::format::seal::FamilyKey;
use crate::format::{BLOCK, BLOCK_BYTES};

const VOLUME: VolumeId = VolumeId([7; 16]);
/// Blocks of the model's disk at first.
const BLOCKS: u64 = 512;

#[derive(Debug, Clone)]
enum Op {
    Write { block: u64, blocks: u64, fill: u8 },
    Zero { block: u64, blocks: u64 },
    TrimAll,
    Grow,
    Commit,
    Checkpoint,
    Reopen,
    NextSegment,
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let op = prop_oneof![
        8 => (0..BLOCKS, 1u64..40, any::<u8>()).prop_map(|(block, blocks, fill)| Op::Write { block, blocks, fill }),
        3 => (0..BLOCKS, 1u64..200).prop_map(|(block, blocks)| Op::Zero { block, blocks }),
        1 => Just(Op::TrimAll),
        1 => Just(Op::Grow),
        3 => Just(Op::Commit),
        1 => Just(Op::Checkpoint),
        2 => Just(Op::Reopen),
        1 => Just(Op::NextSegment),
    ];
    proptest::collection::vec(op, 1..40)
}

struct Disk {
    family: FamilyKey,
    store: HashMap<String, Vec<u8>>,
    content: Content,
    committed: u64,
    segments: Vec<(SegmentHeader, Vec<u8>)>,
    overlay: Overlay,
    map: Map,
    size: u64,
    op: u64,
    seq: u64,
    epoch: u64,
    salt: u8,
}

impl Disk {
    fn new() -> Self {
        let size = BLOCKS * BLOCK;
        let mut disk = Self {
            family: FamilyKey::new([1; 32]),
            store: HashMap::new(),
            content: Content::empty(size),
            committed: 0,
            segments: Vec::new(),
            overlay: Overlay::default(),
            map: Map::default(),
            size,
            op: 0,
            seq: 0,
            epoch: 1,
            salt: 0,
        };
        disk.next_segment();
        disk
    }

    fn next_segment(&mut self) {
        let segment = self.segments.last().map_or(0, |(header, _)| header.segment + 1);
        self.salt = self.salt.wrapping_add(1);
        let header = SegmentHeader { volume: VOLUME, epoch: self.epoch, segment, first_op: self.op + 1, salt: [self.salt; 16] };
        self.segments.push((header, header.write(&self.family).unwrap()));
    }

    fn log(&mut self, change: Change, data: &[u8]) -> LogPlace {
        self.op += 1;
        let (header, bytes) = self.segments.last_mut().unwrap();
        let record = Record { change, op: self.op, durable: self.op - 1, oldest: 0 };
        let at = bytes.len() as u32;
        record.write(&header.key(&self.family).unwrap(), at, &[data], bytes).unwrap();
        LogPlace::of(header.segment, at, &record)
    }

    fn play(&mut self, change: Change, op: u64, place: LogPlace) {
        match change {
            Change::Write { block, blocks } => self.overlay.put(Run { block, blocks, op, place: Place::Log(place) }),
            Change::Zero { block, blocks, .. } => self.overlay.put(Run { block, blocks, op, place: Place::Zero }),
            Change::Resize { size } => self.size = size,
            Change::Mark => {}
        }
    }

    fn change(&mut self, change: Change, data: &[u8]) {
        let place = self.log(change, data);
        self.play(change, self.op, place);
    }

    fn from_log(&self, run: &Run) -> Vec<u8> {
        let Place::Log(start) = run.place else { return vec![0; (run.blocks * BLOCK) as usize] };
        let (header, bytes) = self.segments.iter().find(|(header, _)| header.segment == start.segment).unwrap();
        let key = header.key(&self.family).unwrap();
        let one = |number| {
            let place = start.skip(number);
            let mut block = bytes[place.data as usize..][..BLOCK_BYTES].to_vec();
            open_block(&key, place.data, bytes[place.tags as usize..][..16].try_into().unwrap(), &mut block).unwrap();
            block
        };
        (0..run.blocks).flat_map(one).collect()
    }

    fn load_all(&mut self) {
        let mut found = Vec::new();
        while let Some(missing) = self.map.get(0..self.size / BLOCK, &mut found) {
            let object = &self.store[&missing.at.object.key()];
            let page = Page::open(&self.family, missing.number, &missing.at, slice(object, missing.at.frame).unwrap()).unwrap();
            self.map.load(missing.number, Arc::new(page));
            found.clear();
        }
    }

    fn read(&mut self) -> Vec<u8> {
        self.load_all();
        let mut out = Vec::new();
        for piece in self.overlay.get(0..self.size / BLOCK) {
            match piece {
                Ok(run) => out.extend(self.from_log(&run)),
                Err(range) => {
                    let mut found = Vec::new();
                    assert!(self.map.get(range, &mut found).is_none());
                    for run in found {
                        let len = (run.blocks * BLOCK) as usize;
                        let Some((pack, stored)) = run.place else {
                            out.resize(out.len() + len, 0);
                            continue;
                        };
                        let inside = self.content.deltas.iter().find(|delta| delta.pack == pack).and_then(|delta| delta.body.as_ref());
                        let object = inside.unwrap_or_else(|| &self.store[&pack.key()]);
                        let plain = open_extent(&self.family, &pack, &stored, slice(object, stored.frame).unwrap()).unwrap();
                        out.extend_from_slice(&plain[stored.skip as usize * BLOCK_BYTES..][..len]);
                    }
                }
            }
        }
        out
    }

    fn commit(&mut self, checkpoint: bool) {
        self.seq += 1;
        let until = self.op;
        let runs = self.overlay.changed(self.committed, until);
        if runs.is_empty() && self.content.size == self.size && !checkpoint {
            return;
        }
        // What lies in the head goes into a pack with the rest, now and then.
        let dropped = takes_up(&self.content, runs.len() > 3, 0) || checkpoint;
        let mut pieces: Vec<(u64, Option<Vec<u8>>, u64)> = Vec::new();
        if dropped {
            self.load_all();
            let bodies: Vec<PackRef> = self.content.deltas.iter().filter(|delta| delta.body.is_some()).map(|delta| delta.pack).collect();
            let all = self.read();
            for range in taken_up(&self.family, &self.content, &runs).unwrap() {
                let mut found = Vec::new();
                self.map.get(range, &mut found);
                for run in found {
                    match run.place {
                        None => pieces.push((run.block, None, run.blocks)),
                        Some((pack, _)) if bodies.contains(&pack) => {
                            let plain = &all[(run.block * BLOCK) as usize..][..(run.blocks * BLOCK) as usize];
                            pieces.push((run.block, Some(plain.to_vec()), run.blocks));
                        }
                        Some(_) => {}
                    }
                }
            }
            self.content.deltas.retain(|delta| delta.body.is_none());
        }
        for item in cut(&runs) {
            match item {
                Item::Hole { block, blocks } => pieces.push((block, None, blocks)),
                Item::Extent { block, blocks, runs } => {
                    pieces.push((block, Some(runs.iter().flat_map(|run| self.from_log(run)).collect()), blocks))
                }
            }
        }
        pieces.sort_by_key(|(block, _, _)| *block);
        let first = PackRef { volume: VOLUME, epoch: self.epoch, seq: self.seq, n: 0, salt: [0; 16] };
        let family = self.family.clone();
        let (mut packs, mut done) = (Packs::new(&family, first, || Ok([3; 16])), Vec::new());
        for (block, plain, blocks) in pieces {
            done.extend(match plain {
                Some(plain) => packs.blocks(block, &plain).unwrap(),
                None => packs.hole(block, blocks).unwrap(),
            });
        }
        done.extend(packs.finish().unwrap());
        for pack in done {
            let mut delta = pack.delta;
            self.map.apply(delta.pack, &pack.pointers);
            if !checkpoint && self.content.bodies_bytes() + pack.bytes.len() <= BODIES_BYTES_MAX {
                delta.body = Some(pack.bytes);
            } else {
                assert!(self.store.insert(delta.pack.key(), pack.bytes).is_none(), "a name was used twice");
            }
            self.content.deltas.push(delta);
        }
        self.content.size = self.size;
        if checkpoint || wants_checkpoint(&self.content) {
            self.checkpoint();
        }
        self.content.check("it").unwrap();
        self.committed = until;
        self.give_back();
    }

    /// Segments that S3 has are given back, and their blocks are read from there.
    fn give_back(&mut self) {
        let keep = self.segments.len() - 1;
        let oldest = self.segments[keep].0.segment;
        self.overlay.forget(self.committed, oldest);
        self.segments.drain(..keep);
    }

    fn checkpoint(&mut self) {
        self.load_all();
        let object = MapRef { volume: VOLUME, epoch: self.epoch, seq: self.seq, salt: [4; 16] };
        let mut writer = MapWriter::new(&self.family, object).unwrap();
        let full = self.map.changed().into_iter().filter(|(_, page)| !page.pointers.is_empty());
        let written: BTreeMap<_, _> = full.map(|(number, page)| (number, writer.page(number, &page).unwrap())).collect();
        let (bytes, root) = writer.finish(&self.map.root(self.size, &written)).unwrap();
        assert!(self.store.insert(object.key(), bytes).is_none());
        self.map.stored(&written);
        self.content.root = Some(root);
        self.content.deltas.clear();
    }

    fn reopen(&mut self) {
        self.epoch += 1;
        self.seq = 0;
        (self.overlay, self.map, self.size) = (Overlay::default(), Map::default(), self.content.size);
        if let Some(root) = &self.content.root {
            let object = &self.store[&root.object.key()];
            self.map = Map::new(&Root::open(&self.family, root, slice(object, root.frame).unwrap()).unwrap());
        }
        for delta in &self.content.deltas {
            let object = delta.body.as_ref().unwrap_or_else(|| &self.store[&delta.pack.key()]);
            self.map.apply(delta.pack, &open_table(&self.family, delta, slice(object, delta.table).unwrap()).unwrap());
        }
        let mut scan = Scan::new(self.committed, None);
        for (header, bytes) in self.segments.clone() {
            let header = SegmentHeader::read(VOLUME, &self.family, &bytes[..4096]).inspect(|read| assert_eq!(*read, header)).unwrap();
            for entry in scan.feed(&header, &header.key(&self.family).unwrap(), &bytes) {
                self.play(entry.record.change, entry.record.op, entry.place);
            }
        }
        assert_eq!(scan.end().unwrap().op, self.op);
        self.next_segment();
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_disk_is_what_a_plain_array_is(ops in ops()) {
        let mut disk = Disk::new();
        let mut plain = vec![0; disk.size as usize];
        for op in ops {
            let last = plain.len() as u64 / BLOCK;
            match op {
                Op::Write { block, blocks, fill } => {
                    let blocks = blocks.min(last - block);
                    let data: Vec<u8> = (0..blocks * BLOCK).map(|at| if fill % 5 == 0 { 0 } else { fill ^ (at / 37) as u8 ^ (at % 11) as u8 }).collect();
                    plain[(block * BLOCK) as usize..][..data.len()].copy_from_slice(&data);
                    disk.change(Change::Write { block, blocks }, &data);
                }
                Op::Zero { block, blocks } => {
                    let blocks = blocks.min(last - block);
                    plain[(block * BLOCK) as usize..][..(blocks * BLOCK) as usize].fill(0);
                    disk.change(Change::Zero { block, blocks, hole: true }, &[]);
                }
                Op::TrimAll => {
                    plain.fill(0);
                    disk.change(Change::Zero { block: 0, blocks: last, hole: true }, &[]);
                }
                Op::Grow => {
                    plain.resize(plain.len() + 100 * BLOCK_BYTES, 0);
                    disk.change(Change::Resize { size: plain.len() as u64 }, &[]);
                }
                Op::Commit => disk.commit(false),
                Op::Checkpoint => disk.commit(true),
                Op::Reopen => disk.reopen(),
                Op::NextSegment => disk.next_segment(),
            }
        }
        prop_assert!(disk.read() == plain, "before");
        disk.reopen();
        prop_assert!(disk.read() == plain, "after");
        // From the store alone, as on another host.
        disk.commit(false);
        disk.segments.clear();
        disk.next_segment();
        disk.reopen();
        prop_assert!(disk.read() == plain, "elsewhere");
    }
}
