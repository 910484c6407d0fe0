//! The head: the one object of a volume that is ever replaced, always on the condition that it is still what the writer knows.
//!
//! Owns its fields and their checks. What a change of it may be is `state/fence.rs`'s. Key: `vol/<id>/head`; it is never deleted while the volume lives.
//!
//! An envelope (`envelope.rs`), letters `VVHD`, version 1, at most 2 MiB. Open part, CBOR with the numbers below; sealed part: [`States`], CBOR, under the
//! family's key.
//!
//! Two states: **accepted** is what a new attempt begins with, and moves when the log has accepted an attempt's success. **working** is what the
//! current holder writes, and moves with each commit. The state of a failed attempt stays there until the next holder begins.

use minicbor::{Decode, Encode};
use volley_jobspecs::ids::{AttemptName, SnapshotId, TenantId, VolumeId, check_name};

use super::content::Content;
use super::envelope::{Form, decode, encode, read, write};
use super::seal::{ClusterKeys, FamilyKey, Salt, WrappedKey};
use super::{FormatError, keys};

const FORM: Form = Form { what: "a volume's head", magic: *b"VVHD", version: 1, bytes_max: HEAD_BYTES_MAX };
/// Largest head. Two states with 96 KiB of packs and 64 deltas each have 220 KB; a checkpoint keeps them there.
pub const HEAD_BYTES_MAX: usize = 2 << 20;

/// Who wrote what is on the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Encode, Decode)]
#[cbor(index_only)]
pub enum WrittenBy {
    /// Only Volley itself, or nobody.
    #[n(0)]
    Host,
    /// A guest, or somebody's image: no host mounts it. Inherited by snapshots and clones, never taken back.
    #[n(1)]
    Guest,
}

/// What a flush promises.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
#[cbor(index_only)]
pub enum FlushMode {
    /// Nothing beyond the process: for what is thrown away.
    #[n(0)]
    None,
    /// It is on the host's disk.
    #[n(1)]
    Local,
    /// It is in S3.
    #[n(2)]
    S3,
}

/// Who may write.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
pub struct Holder {
    /// The host, for people.
    #[n(0)]
    pub host: String,
    /// Drawn at random by each attach: a volume server that was restarted knows its own by it.
    #[cbor(n(1), with = "minicbor::bytes")]
    pub attach: [u8; 16],
    /// Until when it should be left alone, in milliseconds since the Unix epoch. A hint: what keeps others out is the epoch.
    #[n(2)]
    pub until_ms: u64,
}

/// The volume is deleted; what is left goes with the next collection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
pub struct Tombstone {
    /// When, in milliseconds since the Unix epoch.
    #[n(0)]
    pub at_ms: u64,
}

/// The state that stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Accepted {
    /// Rises by one with each promotion; 0 is how the volume was made.
    pub generation: u64,
    /// Whose result it is; None: how the volume was made, or a person's.
    pub attempt: Option<AttemptName>,
    /// The disk.
    pub content: Content,
}

/// What the holder has written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Working {
    /// Who writes; None: a person.
    pub attempt: Option<AttemptName>,
    /// Of the commit that made it; the holder's own epoch and 0 before its first.
    pub epoch: u64,
    /// Of that commit.
    pub seq: u64,
    /// The last operation of the holder's log that is in it: recovery goes on behind it.
    pub op: u64,
    /// The disk.
    pub content: Content,
}

/// A volume's head.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Head {
    /// The volume.
    pub volume: VolumeId,
    /// Whose it is.
    pub tenant: TenantId,
    /// The current writer's right; rises with each attach.
    pub epoch: u64,
    /// The last commit within the epoch, from 1; 0: none yet.
    pub seq: u64,
    /// Drawn at random for each writing of the head: tells one's own writing whose answer was lost.
    pub commit: [u8; 16],
    /// Who wrote on the disk.
    pub written_by: WrittenBy,
    /// What a flush promises.
    pub flush: FlushMode,
    /// The family's key.
    pub key: WrappedKey,
    /// When the volume was made, in milliseconds since the Unix epoch.
    pub created_ms: u64,
    /// The snapshot it is a clone of.
    pub base: Option<SnapshotId>,
    /// Who has it attached.
    pub holder: Option<Holder>,
    /// Is it deleted?
    pub tombstone: Option<Tombstone>,
    /// What stands.
    pub accepted: Accepted,
    /// What is being written.
    pub working: Option<Working>,
}

/// What anybody may read.
#[derive(Encode, Decode)]
struct Open {
    #[n(0)]
    volume: VolumeId,
    #[n(1)]
    tenant: TenantId,
    #[n(2)]
    epoch: u64,
    #[n(3)]
    seq: u64,
    #[cbor(n(4), with = "minicbor::bytes")]
    commit: [u8; 16],
    #[n(5)]
    written_by: WrittenBy,
    #[n(6)]
    flush: FlushMode,
    #[n(7)]
    key: WrappedKey,
    #[n(8)]
    created_ms: u64,
    #[n(9)]
    base: Option<SnapshotId>,
    #[n(10)]
    holder: Option<Holder>,
    #[n(11)]
    tombstone: Option<Tombstone>,
    #[n(12)]
    accepted: AcceptedLine,
    #[n(13)]
    working: Option<WorkingLine>,
}

#[derive(Encode, Decode)]
struct AcceptedLine {
    #[n(0)]
    generation: u64,
    #[n(1)]
    attempt: Option<AttemptName>,
    #[n(2)]
    size: u64,
    /// Digest of the content.
    #[cbor(n(3), with = "minicbor::bytes")]
    root: [u8; 32],
}

#[derive(Encode, Decode)]
struct WorkingLine {
    #[n(0)]
    attempt: Option<AttemptName>,
    #[n(1)]
    epoch: u64,
    #[n(2)]
    seq: u64,
    #[n(3)]
    op: u64,
    #[n(4)]
    size: u64,
    #[cbor(n(5), with = "minicbor::bytes")]
    root: [u8; 32],
}

/// What is sealed: where the bytes lie.
#[derive(Encode, Decode)]
struct States {
    #[n(0)]
    accepted: Content,
    #[n(1)]
    working: Option<Content>,
}

/// The parts of a head that need no key, as `volume ls` and the fence see them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Summary {
    /// See [`Head::volume`].
    pub volume: VolumeId,
    /// See [`Head::tenant`].
    pub tenant: TenantId,
    /// See [`Head::epoch`].
    pub epoch: u64,
    /// See [`Head::seq`].
    pub seq: u64,
    /// See [`Head::holder`].
    pub holder: Option<Holder>,
    /// See [`Head::tombstone`].
    pub tombstone: Option<Tombstone>,
    /// Generation and digest of the accepted state, and its size in bytes.
    pub accepted: (u64, [u8; 32], u64),
}

impl Head {
    /// The state that a reader who attaches now begins with.
    #[must_use]
    pub fn latest(&self) -> &Content {
        self.working.as_ref().map_or(&self.accepted.content, |working| &working.content)
    }

    /// Its bytes. `salt`: fresh and random.
    ///
    /// # Errors
    /// [`FormatError::Make`] when it has grown too large or breaks a rule that a reader checks.
    pub fn write(&self, family: &FamilyKey, salt: Salt) -> Result<Vec<u8>, FormatError> {
        self.check()?;
        let open = Open {
            volume: self.volume,
            tenant: self.tenant.clone(),
            epoch: self.epoch,
            seq: self.seq,
            commit: self.commit,
            written_by: self.written_by,
            flush: self.flush,
            key: self.key.clone(),
            created_ms: self.created_ms,
            base: self.base,
            holder: self.holder.clone(),
            tombstone: self.tombstone,
            accepted: AcceptedLine {
                generation: self.accepted.generation,
                attempt: self.accepted.attempt,
                size: self.accepted.content.size,
                root: self.accepted.content.digest(),
            },
            working: self.working.as_ref().map(|working| WorkingLine {
                attempt: working.attempt,
                epoch: working.epoch,
                seq: working.seq,
                op: working.op,
                size: working.content.size,
                root: working.content.digest(),
            }),
        };
        let working = self.working.as_ref().map(|working| working.content.clone());
        let states = encode(FORM.what, &States { accepted: self.accepted.content.clone(), working })?;
        let key = family.object(&keys::head(self.volume), &salt)?;
        write(FORM, &encode(FORM.what, &open)?, Some((&key, salt, &states)))
    }

    /// Reads the head of `volume`, with its family's key.
    ///
    /// # Errors
    /// [`FormatError`].
    pub fn read(volume: VolumeId, keys_held: &ClusterKeys, bytes: &[u8]) -> Result<(Self, FamilyKey), FormatError> {
        let envelope = read(FORM, bytes)?;
        let open: Open = decode(FORM.what, envelope.open)?;
        let family = FamilyKey::unwrap(&open.key, keys_held)?;
        let states: States = decode(FORM.what, &envelope.unseal(&family.object(&keys::head(volume), &envelope.salt)?)?)?;
        let working = match (open.working, states.working) {
            (Some(line), Some(content)) => {
                same(&content, line.size, line.root)?;
                Some(Working { attempt: line.attempt, epoch: line.epoch, seq: line.seq, op: line.op, content })
            }
            (None, None) => None,
            (line, _) => return Err(bad("working state", u64::from(line.is_some()))),
        };
        same(&states.accepted, open.accepted.size, open.accepted.root)?;
        let accepted = Accepted { generation: open.accepted.generation, attempt: open.accepted.attempt, content: states.accepted };
        let Open { tenant, epoch, seq, commit, written_by, flush, key, created_ms, base, holder, tombstone, .. } = open;
        let id = open.volume;
        let head =
            Self { volume: id, tenant, epoch, seq, commit, written_by, flush, key, created_ms, base, holder, tombstone, accepted, working };
        if id != volume {
            return Err(FormatError::Seal { what: FORM.what });
        }
        head.check()?;
        Ok((head, family))
    }

    fn check(&self) -> Result<(), FormatError> {
        // Names that were decoded were checked by nobody.
        check_name(self.tenant.as_str()).map_err(|_| bad("tenant", self.tenant.as_str().len() as u64))?;
        self.accepted.content.check(FORM.what)?;
        let Some(working) = &self.working else { return Ok(()) };
        working.content.check(FORM.what)?;
        if (working.epoch, working.seq) > (self.epoch, self.seq) {
            return Err(bad("epoch of the working state", working.epoch));
        }
        Ok(())
    }
}

impl Summary {
    /// Reads what needs no key. Its check sum was right; whether somebody forged it is not known.
    ///
    /// # Errors
    /// [`FormatError`].
    pub fn read(bytes: &[u8]) -> Result<Self, FormatError> {
        let open: Open = decode(FORM.what, read(FORM, bytes)?.open)?;
        check_name(open.tenant.as_str()).map_err(|_| bad("tenant", open.tenant.as_str().len() as u64))?;
        let accepted = (open.accepted.generation, open.accepted.root, open.accepted.size);
        let Open { volume, tenant, epoch, seq, holder, tombstone, .. } = open;
        Ok(Self { volume, tenant, epoch, seq, holder, tombstone, accepted })
    }
}

fn bad(field: &'static str, value: u64) -> FormatError {
    FormatError::Field { what: FORM.what, field, value }
}

fn same(content: &Content, size: u64, root: [u8; 32]) -> Result<(), FormatError> {
    if content.size == size && content.digest() == root { Ok(()) } else { Err(bad("digest of a state with size", size)) }
}

#[cfg(test)]
pub mod tests {
    use proptest::prelude::*;
    use volley_jobspecs::ids::JobId;

    use super::*;
    use crate::format::content::tests::content;

    pub fn cluster() -> ClusterKeys {
        ClusterKeys::new(&[[8; 32]]).unwrap()
    }

    pub fn attempt() -> impl Strategy<Value = Option<AttemptName>> {
        proptest::option::of(
            (any::<u64>(), any::<u32>(), any::<u32>(), any::<u64>()).prop_map(|(job, index, number, sequence)| AttemptName {
                job: JobId(job),
                stage: 0,
                index,
                number,
                sequence,
            }),
        )
    }

    prop_compose! {
        fn head()(
            id: [u8; 16], epoch in 0u64..9, seq in 0u64..9, commit: [u8; 16], guest: bool, mode in 0usize..3, created_ms: u64,
            base in proptest::option::of(any::<[u8; 16]>()), host in "[a-zA-Z0-9 .]{0,20}", attach: [u8; 16], held: bool, dead: bool,
            (generation, accepted_by, accepted) in (any::<u64>(), attempt(), content()),
            working in proptest::option::of((attempt(), content(), any::<u64>())),
        ) -> (Head, FamilyKey) {
            let family = FamilyKey::new(id.repeat(2).try_into().unwrap());
            let key = family.wrap(&cluster(), VolumeId(attach), commit).unwrap();
            let head = Head {
                volume: VolumeId(id), tenant: TenantId::new("t-1").unwrap(), epoch, seq, commit, key, created_ms,
                written_by: if guest { WrittenBy::Guest } else { WrittenBy::Host },
                flush: [FlushMode::None, FlushMode::Local, FlushMode::S3][mode],
                base: base.map(SnapshotId),
                holder: held.then_some(Holder { host, attach, until_ms: created_ms }),
                tombstone: dead.then_some(Tombstone { at_ms: created_ms }),
                accepted: Accepted { generation, attempt: accepted_by, content: accepted },
                working: working.map(|(attempt, content, op)| Working { attempt, epoch, seq, op, content }),
            };
            (head, family)
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn a_head_comes_back_and_no_damage_passes((head, family) in head(), salt: Salt, at: prop::sample::Index, bit in 0u8..8) {
            let bytes = head.write(&family, salt).unwrap();
            let (read, key) = Head::read(head.volume, &cluster(), &bytes).unwrap();
            prop_assert_eq!(&read, &head);
            prop_assert_eq!(key.object("x", &salt).unwrap().seal(crate::format::seal::Kind::Page, 0, &[], &mut []), family.object("x", &salt).unwrap().seal(crate::format::seal::Kind::Page, 0, &[], &mut []));
            let summary = Summary::read(&bytes).unwrap();
            prop_assert_eq!((summary.volume, summary.epoch, summary.holder, summary.accepted.1), (head.volume, head.epoch, head.holder.clone(), head.accepted.content.digest()));

            let place = at.index(bytes.len());
            let mut damaged = bytes.clone();
            damaged[place] ^= 1 << bit;
            prop_assert!(Head::read(head.volume, &cluster(), &damaged).is_err());
            prop_assert!(Summary::read(&damaged).is_err());
            prop_assert!(Head::read(head.volume, &cluster(), &bytes[..place]).is_err());
            // Damage that was given a fitting sum.
            let end = damaged.len() - 16;
            let sum = *blake3::hash(&damaged[..end]).as_bytes();
            damaged[end..].copy_from_slice(&sum[..16]);
            prop_assert!(place >= end || Head::read(head.volume, &cluster(), &damaged).is_err());
            let mut other = head.volume;
            other.0[0] ^= 1;
            prop_assert!(Head::read(other, &cluster(), &bytes).is_err());
            prop_assert!(Head::read(head.volume, &ClusterKeys::new(&[[1; 32]]).unwrap(), &bytes).is_err());
        }

        #[test]
        fn other_bytes_are_no_head(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            prop_assert!(Head::read(VolumeId([0; 16]), &cluster(), &bytes).is_err() && Summary::read(&bytes).is_err());
        }
    }

    /// What version 1 looks like, byte for byte: a change of this text is a change of the format.
    #[test]
    fn the_layout_stays() {
        let (volume, family) = (VolumeId([1; 16]), FamilyKey::new([2; 32]));
        let head = Head {
            volume,
            tenant: TenantId::new("acme").unwrap(),
            epoch: 3,
            seq: 4,
            commit: [5; 16],
            written_by: WrittenBy::Guest,
            flush: FlushMode::Local,
            key: family.wrap(&cluster(), volume, [6; 16]).unwrap(),
            created_ms: 7,
            base: None,
            holder: Some(Holder { host: "h".into(), attach: [8; 16], until_ms: 9 }),
            tombstone: None,
            accepted: Accepted { generation: 10, attempt: None, content: Content::empty(1 << 20) },
            working: None,
        };
        let bytes = head.write(&family, [11; 16]).unwrap();
        assert_eq!(hex::encode(blake3::hash(&bytes).as_bytes()), LAYOUT, "{}", hex::encode(&bytes));
    }
    const LAYOUT: &str = "d1c399ba256a413adcf072e07db9c1bd617e5c982f927622ac107117dba4dbd6";
}
