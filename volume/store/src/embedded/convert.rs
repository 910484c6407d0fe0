//! Protocol values ↔ the disk's: conditions, pages, tokens, times.
//!
//! Owns the text forms. Pure.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use s3s::dto::*;
use s3s::{S3Result, s3_error};

use super::disk::{Condition, DiskError, Wanted};
use super::object_file::Trailer;
use super::walk::{After, Page};

/// Keys in a page, uploads in a page, parts in a page: the protocol's limit and default.
pub(super) const PAGE_MAX: i32 = 1000;

pub(super) fn condition(if_match: Option<IfMatch>, if_none_match: Option<IfNoneMatch>) -> S3Result<Condition> {
    Ok(Condition { exists: wanted(if_match)?, absent: wanted(if_none_match)? })
}

pub(super) fn wanted(condition: Option<ETagCondition>) -> S3Result<Option<Wanted>> {
    match condition {
        None => Ok(None),
        Some(ETagCondition::Any) => Ok(Some(Wanted::Any)),
        Some(ETagCondition::ETag(etag)) => match etag.into_strong() {
            Some(tag) => Ok(Some(Wanted::Tag(tag))),
            None => Err(s3_error!(InvalidArgument, "Weak entity tags cannot be compared.")),
        },
    }
}

pub(super) fn check_read(trailer: &Trailer, if_match: Option<&Wanted>, if_none_match: Option<&Wanted>) -> S3Result<()> {
    if if_match.is_some_and(|wanted| !wanted.matches(&trailer.etag)) {
        return Err(DiskError::Precondition.into());
    }
    if if_none_match.is_some_and(|wanted| wanted.matches(&trailer.etag)) {
        return Err(s3_error!(NotModified));
    }
    Ok(())
}

pub(super) fn page_size(asked: Option<i32>) -> S3Result<usize> {
    let asked = asked.unwrap_or(PAGE_MAX);
    usize::try_from(asked.min(PAGE_MAX)).map_err(|_| s3_error!(InvalidArgument, "A page size may not be negative."))
}

pub(super) fn listing(input: ListObjectsV2Input, page: Page, limit: usize) -> ListObjectsV2Output {
    let encoded = input.encoding_type.as_ref().is_some_and(|encoding| encoding.as_str() == EncodingType::URL);
    let text = |bytes: Vec<u8>| if encoded { url_encode(&bytes) } else { String::from_utf8_lossy(&bytes).into_owned() };
    let count = page.objects.len() + page.groups.len();
    let contents = page.objects.into_iter().map(|object| Object {
        key: Some(text(object.key.into_bytes())),
        size: Some(object.bytes as i64),
        e_tag: Some(ETag::Strong(object.etag)),
        last_modified: Some(timestamp(object.modified_ms)),
        ..Object::default()
    });
    let contents = contents.collect();
    let groups = page.groups.into_iter().map(|group| CommonPrefix { prefix: Some(text(group)) }).collect();
    ListObjectsV2Output {
        contents: Some(contents),
        common_prefixes: Some(groups),
        key_count: Some(count as i32),
        max_keys: Some(limit as i32),
        is_truncated: Some(page.next.is_some()),
        next_continuation_token: page.next.map(|next| write_token(&next)),
        prefix: input.prefix.map(|prefix| text(prefix.into_bytes())),
        delimiter: input.delimiter.map(|delimiter| text(delimiter.into_bytes())),
        start_after: input.start_after.map(|key| text(key.into_bytes())),
        continuation_token: input.continuation_token,
        encoding_type: input.encoding_type,
        name: Some(input.bucket),
        ..ListObjectsV2Output::default()
    }
}

fn url_encode(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len());
    for byte in bytes {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'*' | b'/' => text.push(char::from(*byte)),
            b' ' => text.push('+'),
            other => {
                text.push('%');
                text.push_str(&hex::encode_upper([*other]));
            }
        }
    }
    text
}

pub(super) fn write_token(after: &After) -> String {
    match after {
        After::Start => String::new(),
        After::Key(key) => format!("k{}", hex::encode(key)),
        After::Group(group) => format!("g{}", hex::encode(group)),
    }
}

pub(super) fn read_token(token: &str) -> S3Result<After> {
    let bad = || s3_error!(InvalidArgument, "The continuation token is not one that this server gave.");
    let (kind, rest) = token.split_at_checked(1).ok_or_else(bad)?;
    let bytes = hex::decode(rest).map_err(|_| bad())?;
    match kind {
        "k" => Ok(After::Key(bytes)),
        "g" => Ok(After::Group(bytes)),
        _ => Err(bad()),
    }
}

pub(super) fn timestamp(ms: u64) -> Timestamp {
    let at: SystemTime = UNIX_EPOCH + Duration::from_millis(ms);
    at.into()
}
