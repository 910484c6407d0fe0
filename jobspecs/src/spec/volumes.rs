//! The volumes of a task, as the spec says them.
//!
//! Owns the types. Does not own what fits together (`validate/volumes`), or how a volume is stored (crate `volume`).

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::scalars::ByteSize;

/// Most volumes of a task: so many places for them has a machine when it is saved, and every tier is held to the same.
pub const VOLUMES_MAX: usize = 4;
/// Longest name of a volume or of a snapshot, in bytes: both stand in one key beside the tenant's.
pub const NAME_BYTES_MAX: usize = 128;

/// A volume that is mounted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct VolumeMount {
    /// The volume's name, 1 to 128 of a-z A-Z 0-9 . _ -, beginning with a letter or digit; `name@snapshot` for one of its snapshots. With
    /// `rw`, `${index}` and `${job.id}` may stand in it: whose turn it is to write is known before a task's item is.
    #[schemars(extend("examples" = ["state", "dataset@monday"]))]
    pub volume: String,
    /// Where it is mounted: an absolute path; with isolation `process` a path within the task's own directory.
    #[schemars(extend("examples" = ["/data"]))]
    pub path: String,
    /// `ro` (default): read, by many at once. `rw`: written, by one task at a time; others wait. `clone`: a private copy for each task. With `ro` and
    /// `clone`, all tasks and tries of a job see what the volume was when the job was accepted.
    #[serde(default)]
    pub access: Access,
    /// With `rw`: the volume is made with this size if there is none, or grown to it. With `clone`: the copy is grown to it. A volume never
    /// shrinks. Left out: it must exist, and stays as large as it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("examples" = ["10GiB"]))]
    pub size: Option<ByteSize>,
    /// The file system of a volume that is made. Only with `rw` and `size`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fs: Option<FileSystem>,
    /// Who owns the top directory of a volume that is made, in numbers: `uid` or `uid:gid`. Left out: whoever runs the command. Only with `rw` and `size`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("pattern" = "^[0-9]{1,10}(:[0-9]{1,10})?$", "examples" = ["1000:1000"]))]
    pub owner: Option<String>,
    /// The mode of that directory, in octal. Default "0755". Only with `rw` and `size`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("pattern" = "^[0-7]{3,4}$", "examples" = ["0770"]))]
    pub mode: Option<String>,
    /// What a task's flush waits for: `none`, `local` (default) or `s3`. Only with `rw` and `clone`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub flush: Option<Flush>,
    /// Whether a `clone` stays as a volume, and under which name. Left out: it goes with its task.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep: Option<KeepClone>,
}

/// How a volume is used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum Access {
    /// Read, by many at once.
    #[default]
    Ro,
    /// Written, by one at a time.
    Rw,
    /// A private copy for each task.
    Clone,
}

/// What a flush waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum Flush {
    /// Nothing.
    None,
    /// The worker's disk.
    Local,
    /// The bucket.
    S3,
}

/// A file system.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum FileSystem {
    /// Linux's ext4.
    #[default]
    Ext4,
}

/// A clone that is kept.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct KeepClone {
    /// After which tries: `onSuccess` (default), `always`, or `never`.
    #[serde(default)]
    pub when: KeepWhen,
    /// The name it gets, in the form of `volume`. It must hold `${index}` where there may be more than one task, and `${attempt}` with `always`: a name that
    /// is another volume's is never taken from it.
    #[schemars(extend("examples" = ["result-${index}"]))]
    pub name: String,
}

/// When a clone is kept.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum KeepWhen {
    /// Not at all.
    Never,
    /// After the try that the task succeeds with.
    #[default]
    OnSuccess,
    /// After every try whose machine and storage were sound, also one that failed.
    Always,
}

/// Why a text names no volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// Nothing is there.
    #[error("empty")]
    Empty,
    /// Too long.
    #[error("longer than {NAME_BYTES_MAX} bytes")]
    TooLong,
    /// Something else than letters, digits and `. _ -`, or not first a letter or digit.
    #[error("not the form of a volume's name")]
    Form,
    /// More than one `@`.
    #[error("more than one @")]
    Twice,
}

/// Checks a volume's or a snapshot's own name.
///
/// # Errors
/// [`NameError`].
pub fn check_name(name: &str) -> Result<(), NameError> {
    if name.is_empty() {
        return Err(NameError::Empty);
    }
    if name.len() > NAME_BYTES_MAX {
        return Err(NameError::TooLong);
    }
    let fit = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    let first = name.starts_with(|c: char| c.is_ascii_alphanumeric());
    if first && name.chars().all(fit) { Ok(()) } else { Err(NameError::Form) }
}

/// Parts `name@snapshot`: the volume's name, and the snapshot's if there is one.
///
/// # Errors
/// [`NameError`].
pub fn parse_name(text: &str) -> Result<(&str, Option<&str>), NameError> {
    let (name, snapshot) = match text.split_once('@') {
        Some((name, snapshot)) => (name, Some(snapshot)),
        None => (text, None),
    };
    if snapshot.is_some_and(|snapshot| snapshot.contains('@')) {
        return Err(NameError::Twice);
    }
    check_name(name)?;
    snapshot.map_or(Ok(()), check_name)?;
    Ok((name, snapshot))
}

/// Reads `uid` or `uid:gid`; a group that is left out is the user's own number. None for anything else.
#[must_use]
pub fn parse_owner(text: &str) -> Option<(u32, u32)> {
    // `parse` alone would take a sign.
    let number = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok()).flatten();
    match text.split_once(':') {
        Some((uid, gid)) => Some((number(uid)?, number(gid)?)),
        None => number(text).map(|uid| (uid, uid)),
    }
}

/// Reads a mode in octal, `755` or `0755`. None for anything else.
#[must_use]
pub fn parse_mode(text: &str) -> Option<u32> {
    let fit = matches!(text.len(), 3 | 4) && text.bytes().all(|byte| matches!(byte, b'0'..=b'7'));
    fit.then(|| u32::from_str_radix(text, 8).ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_one_form() {
        assert_eq!(parse_name("state"), Ok(("state", None)));
        assert_eq!(parse_name("a.b_c-9@Mon"), Ok(("a.b_c-9", Some("Mon"))));
        for (text, why) in [
            ("", NameError::Empty),
            ("a@", NameError::Empty),
            ("@a", NameError::Empty),
            ("a@b@c", NameError::Twice),
            ("../x", NameError::Form),
            ("a/b", NameError::Form),
            (".a", NameError::Form),
            ("é", NameError::Form),
            (&*"x".repeat(129), NameError::TooLong),
        ] {
            assert_eq!(parse_name(text), Err(why), "{text}");
        }
    }

    #[test]
    fn owners_and_modes_are_numbers() {
        assert_eq!([parse_owner("0"), parse_owner("1000:4294967295")], [Some((0, 0)), Some((1000, u32::MAX))]);
        for text in ["", ":", "me", "+1", "1:", "1:2:3", "4294967296", " 1"] {
            assert_eq!(parse_owner(text), None, "{text}");
        }
        assert_eq!([parse_mode("755"), parse_mode("1777")], [Some(0o755), Some(0o1777)]);
        for text in ["", "7", "0o755", "788", "07777", "rwx"] {
            assert_eq!(parse_mode(text), None, "{text}");
        }
    }
}
