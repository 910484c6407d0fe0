//! The S3 operations that the embedded server knows, over `disk`, `walk` and `uploads`.
//!
//! Owns what each operation does. Bodies come in through `spool`, values are translated by `convert`. Signatures, XML and routing
//! are the `s3s` crate's. Bodies are checked against the signature's payload hash by `s3s`;
//! `Content-MD5` and `x-amz-checksum-*` are accepted and not checked again.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use bytes::Bytes;
use s3s::dto::*;
use s3s::{Body, S3, S3Error, S3Request, S3Response, S3Result, s3_error};
use tokio::io::{AsyncReadExt, AsyncSeekExt};
use tokio_util::io::ReaderStream;

use super::answer::io_error;
use super::convert::{PAGE_MAX, check_read, condition, listing, page_size, read_token, timestamp, wanted};
use super::disk::{Condition, Disk, DiskError, Wanted, now_ms};
use super::uploads::{PART_NUMBER_MAX, Upload};
use super::walk::{self, After, Query};

/// Objects up to this size are read in one go.
const INLINE_BYTES_MAX: u64 = 128 * 1024;
/// Bytes read from disk at a time for larger ones.
const READ_BYTES: usize = 256 * 1024;

type Answer<T> = S3Result<S3Response<T>>;

pub(super) struct Service {
    disk: Arc<Disk>,
}

impl Service {
    pub(super) fn new(disk: Arc<Disk>) -> Self {
        Self { disk }
    }

    /// Runs disk work where it may block.
    pub(super) async fn blocking<T, F>(&self, work: F) -> S3Result<T>
    where
        T: Send + 'static,
        F: FnOnce(&Disk) -> Result<T, DiskError> + Send + 'static,
    {
        let disk = self.disk.clone();
        Ok(joined(tokio::task::spawn_blocking(move || work(&disk)).await)??)
    }
}

#[async_trait::async_trait]
impl S3 for Service {
    async fn create_bucket(&self, req: S3Request<CreateBucketInput>) -> Answer<CreateBucketOutput> {
        let location = Some(format!("/{}", req.input.bucket));
        self.blocking(move |disk| disk.create_bucket(&req.input.bucket)).await?;
        Ok(S3Response::new(CreateBucketOutput { location }))
    }

    async fn head_bucket(&self, req: S3Request<HeadBucketInput>) -> Answer<HeadBucketOutput> {
        self.blocking(move |disk| disk.bucket(&req.input.bucket)).await?;
        Ok(S3Response::new(HeadBucketOutput::default()))
    }

    async fn delete_bucket(&self, req: S3Request<DeleteBucketInput>) -> Answer<DeleteBucketOutput> {
        self.blocking(move |disk| disk.delete_bucket(&req.input.bucket)).await?;
        Ok(S3Response::new(DeleteBucketOutput::default()))
    }

    async fn get_bucket_location(&self, req: S3Request<GetBucketLocationInput>) -> Answer<GetBucketLocationOutput> {
        self.blocking(move |disk| disk.bucket(&req.input.bucket)).await?;
        Ok(S3Response::new(GetBucketLocationOutput::default()))
    }

    async fn list_buckets(&self, _req: S3Request<ListBucketsInput>) -> Answer<ListBucketsOutput> {
        let buckets = self.blocking(|disk| disk.buckets()).await?;
        let buckets =
            buckets.into_iter().map(|(name, made)| Bucket { name: Some(name), creation_date: Some(made.into()), ..Bucket::default() });
        Ok(S3Response::new(ListBucketsOutput { buckets: Some(buckets.collect()), ..ListBucketsOutput::default() }))
    }

    async fn put_object(&self, req: S3Request<PutObjectInput>) -> Answer<PutObjectOutput> {
        let input = req.input;
        let when = condition(input.if_match, input.if_none_match)?;
        let spool = self.receive(input.body, input.content_length).await?;
        let (bucket, key) = (input.bucket, input.key);
        let (content_type, metadata) = (input.content_type, input.metadata);
        let trailer = self
            .blocking(move |disk| {
                let (temp, trailer) = spool.finished(disk, key, content_type, metadata)?;
                disk.commit(temp, &bucket, &trailer, &when)?;
                Ok(trailer)
            })
            .await?;
        Ok(S3Response::new(PutObjectOutput { e_tag: Some(ETag::Strong(trailer.etag)), ..PutObjectOutput::default() }))
    }

    async fn get_object(&self, req: S3Request<GetObjectInput>) -> Answer<GetObjectOutput> {
        let input = req.input;
        let (if_match, if_none_match) = (wanted(input.if_match)?, wanted(input.if_none_match)?);
        let range = input.range;
        let (file, trailer, span, inline) = self
            .blocking(move |disk| {
                let (file, trailer) = disk.read(&input.bucket, &input.key)?;
                let span = match range {
                    Some(range) => range.check(trailer.bytes).ok(),
                    None => Some(0..trailer.bytes),
                };
                let inline = match &span {
                    Some(span) if span.end - span.start <= INLINE_BYTES_MAX => Some(read_span(&file, span)?),
                    _ => None,
                };
                Ok((file, trailer, span, inline))
            })
            .await?;
        check_read(&trailer, if_match.as_ref(), if_none_match.as_ref())?;
        let span = span.ok_or_else(|| s3_error!(InvalidRange, "The range lies past the object's {} bytes.", trailer.bytes))?;
        let content_range = range.map(|_| format!("bytes {}-{}/{}", span.start, span.end.saturating_sub(1), trailer.bytes));
        let bytes = span.end - span.start;
        let body = match inline {
            Some(bytes) => StreamingBlob::from(Body::from(Bytes::from(bytes))),
            None => {
                let mut file = tokio::fs::File::from_std(file);
                file.seek(std::io::SeekFrom::Start(span.start)).await.map_err(io_error)?;
                StreamingBlob::wrap(ReaderStream::with_capacity(file.take(bytes), READ_BYTES))
            }
        };
        Ok(S3Response::new(GetObjectOutput {
            body: Some(body),
            content_length: Some(bytes as i64),
            content_range,
            accept_ranges: Some("bytes".to_owned()),
            content_type: trailer.content_type,
            last_modified: Some(timestamp(trailer.modified_ms)),
            e_tag: Some(ETag::Strong(trailer.etag)),
            metadata: Some(trailer.metadata.into_iter().collect()),
            ..GetObjectOutput::default()
        }))
    }

    async fn head_object(&self, req: S3Request<HeadObjectInput>) -> Answer<HeadObjectOutput> {
        let input = req.input;
        let (if_match, if_none_match) = (wanted(input.if_match)?, wanted(input.if_none_match)?);
        let (_, trailer) = self.blocking(move |disk| disk.read(&input.bucket, &input.key)).await?;
        check_read(&trailer, if_match.as_ref(), if_none_match.as_ref())?;
        Ok(S3Response::new(HeadObjectOutput {
            content_length: Some(trailer.bytes as i64),
            accept_ranges: Some("bytes".to_owned()),
            content_type: trailer.content_type,
            last_modified: Some(timestamp(trailer.modified_ms)),
            e_tag: Some(ETag::Strong(trailer.etag)),
            metadata: Some(trailer.metadata.into_iter().collect()),
            ..HeadObjectOutput::default()
        }))
    }

    async fn delete_object(&self, req: S3Request<DeleteObjectInput>) -> Answer<DeleteObjectOutput> {
        let input = req.input;
        let when = condition(input.if_match, None)?;
        self.blocking(move |disk| disk.delete(&input.bucket, &input.key, &when)).await?;
        Ok(S3Response::new(DeleteObjectOutput::default()))
    }

    async fn delete_objects(&self, req: S3Request<DeleteObjectsInput>) -> Answer<DeleteObjectsOutput> {
        let DeleteObjectsInput { bucket, delete, .. } = req.input;
        if delete.objects.len() > PAGE_MAX as usize {
            return Err(s3_error!(MalformedXML, "At most {PAGE_MAX} objects in one request."));
        }
        let quiet = delete.quiet == Some(true);
        let (gone, kept) = self.blocking(move |disk| delete_each(disk, &bucket, delete.objects)).await?;
        let deleted = (!quiet).then(|| gone.into_iter().map(|key| DeletedObject { key: Some(key), ..DeletedObject::default() }).collect());
        let errors = (!kept.is_empty()).then_some(kept);
        Ok(S3Response::new(DeleteObjectsOutput { deleted, errors, ..DeleteObjectsOutput::default() }))
    }

    async fn list_objects_v2(&self, req: S3Request<ListObjectsV2Input>) -> Answer<ListObjectsV2Output> {
        let input = req.input;
        let limit = page_size(input.max_keys)?;
        let after = match (&input.continuation_token, &input.start_after) {
            (Some(token), _) => read_token(token)?,
            (None, Some(key)) if !key.is_empty() => After::Key(key.clone().into_bytes()),
            _ => After::Start,
        };
        let query = Query {
            prefix: input.prefix.clone().unwrap_or_default().into_bytes(),
            after,
            delimiter: input.delimiter.clone().filter(|delimiter| !delimiter.is_empty()).map(String::into_bytes),
            limit,
        };
        let bucket = input.bucket.clone();
        let page = self.blocking(move |disk| Ok(walk::list(&disk.bucket(&bucket)?, &query)?)).await?;
        Ok(S3Response::new(listing(input, page, limit)))
    }

    async fn create_multipart_upload(&self, req: S3Request<CreateMultipartUploadInput>) -> Answer<CreateMultipartUploadOutput> {
        let input = req.input;
        let upload = Upload {
            bucket: input.bucket.clone(),
            key: input.key.clone(),
            began_ms: now_ms(),
            content_type: input.content_type,
            metadata: input.metadata.into_iter().flatten().collect(),
        };
        let id = self.blocking(move |disk| disk.begin_upload(&upload)).await?;
        Ok(S3Response::new(CreateMultipartUploadOutput {
            bucket: Some(input.bucket),
            key: Some(input.key),
            upload_id: Some(id),
            ..CreateMultipartUploadOutput::default()
        }))
    }

    async fn upload_part(&self, req: S3Request<UploadPartInput>) -> Answer<UploadPartOutput> {
        let UploadPartInput { body, bucket, key, upload_id, part_number, content_length, .. } = req.input;
        if !(1..=PART_NUMBER_MAX).contains(&part_number) {
            return Err(s3_error!(InvalidArgument, "Part numbers run from 1 to {PART_NUMBER_MAX}."));
        }
        let spool = self.receive(body, content_length).await?;
        let etag = self
            .blocking(move |disk| {
                let (temp, trailer) = spool.finished(disk, key, None, None)?;
                disk.commit_part(temp, &bucket, &upload_id, part_number, &trailer)?;
                Ok(trailer.etag)
            })
            .await?;
        Ok(S3Response::new(UploadPartOutput { e_tag: Some(ETag::Strong(etag)), ..UploadPartOutput::default() }))
    }

    async fn complete_multipart_upload(&self, req: S3Request<CompleteMultipartUploadInput>) -> Answer<CompleteMultipartUploadOutput> {
        let input = req.input;
        let when = condition(input.if_match, input.if_none_match)?;
        let parts = input.multipart_upload.and_then(|upload| upload.parts).unwrap_or_default();
        let parts: Vec<(i32, String)> =
            parts.into_iter().map(|part| (part.part_number.unwrap_or(0), part.e_tag.map(ETag::into_value).unwrap_or_default())).collect();
        let (bucket, key, id) = (input.bucket.clone(), input.key.clone(), input.upload_id);
        let trailer = self.blocking(move |disk| disk.complete_upload(&bucket, &key, &id, &parts, &when)).await?;
        Ok(S3Response::new(CompleteMultipartUploadOutput {
            location: Some(format!("/{}/{}", input.bucket, input.key)),
            bucket: Some(input.bucket),
            key: Some(input.key),
            e_tag: Some(ETag::Strong(trailer.etag)),
            ..CompleteMultipartUploadOutput::default()
        }))
    }

    async fn abort_multipart_upload(&self, req: S3Request<AbortMultipartUploadInput>) -> Answer<AbortMultipartUploadOutput> {
        let AbortMultipartUploadInput { bucket, key, upload_id, .. } = req.input;
        self.blocking(move |disk| disk.abort_upload(&bucket, &key, &upload_id)).await?;
        Ok(S3Response::new(AbortMultipartUploadOutput::default()))
    }

    async fn list_parts(&self, req: S3Request<ListPartsInput>) -> Answer<ListPartsOutput> {
        let input = req.input;
        let limit = page_size(input.max_parts)?;
        let after = input.part_number_marker.unwrap_or(0);
        let (bucket, key, id) = (input.bucket.clone(), input.key.clone(), input.upload_id.clone());
        let mut parts = self
            .blocking(move |disk| {
                disk.upload(&id, &bucket, &key)?;
                disk.parts(&id, after)
            })
            .await?;
        let is_truncated = parts.len() > limit;
        parts.truncate(limit);
        let next_part_number_marker = parts.last().filter(|_| is_truncated).map(|(number, _)| *number);
        let parts = parts.into_iter().map(|(number, trailer)| Part {
            part_number: Some(number),
            size: Some(trailer.bytes as i64),
            last_modified: Some(timestamp(trailer.modified_ms)),
            e_tag: Some(ETag::Strong(trailer.etag)),
            ..Part::default()
        });
        Ok(S3Response::new(ListPartsOutput {
            parts: Some(parts.collect()),
            bucket: Some(input.bucket),
            key: Some(input.key),
            upload_id: Some(input.upload_id),
            is_truncated: Some(is_truncated),
            max_parts: Some(limit as i32),
            part_number_marker: Some(after),
            next_part_number_marker,
            ..ListPartsOutput::default()
        }))
    }

    async fn list_multipart_uploads(&self, req: S3Request<ListMultipartUploadsInput>) -> Answer<ListMultipartUploadsOutput> {
        let input = req.input;
        let limit = page_size(input.max_uploads)?;
        let prefix = input.prefix.clone().unwrap_or_default();
        // Without an id the marker passes every upload of its key: `g` sorts after every hex digit.
        let key_marker = input.key_marker.clone().unwrap_or_default();
        let after = (key_marker, input.upload_id_marker.clone().unwrap_or_else(|| "g".to_owned()));
        let bucket = input.bucket.clone();
        let (uploads, more) = self
            .blocking(move |disk| {
                disk.bucket(&bucket)?;
                disk.list_uploads(&bucket, &prefix, &after, limit)
            })
            .await?;
        let last = uploads.last().filter(|_| more).map(|(id, upload)| (id.clone(), upload.key.clone()));
        let (next_upload_id_marker, next_key_marker) = last.unzip();
        let uploads = uploads.into_iter().map(|(id, upload)| MultipartUpload {
            upload_id: Some(id),
            key: Some(upload.key),
            initiated: Some(timestamp(upload.began_ms)),
            ..MultipartUpload::default()
        });
        Ok(S3Response::new(ListMultipartUploadsOutput {
            bucket: Some(input.bucket),
            prefix: input.prefix,
            key_marker: input.key_marker,
            upload_id_marker: input.upload_id_marker,
            uploads: Some(uploads.collect()),
            is_truncated: Some(more),
            max_uploads: Some(limit as i32),
            next_key_marker,
            next_upload_id_marker,
            ..ListMultipartUploadsOutput::default()
        }))
    }
}

/// A blocking task's result. It is never cancelled, so a join error is its panic.
fn joined<T>(end: Result<T, tokio::task::JoinError>) -> S3Result<T> {
    end.map_err(|error| s3_error!(InternalError, "A request handler failed: {error}"))
}

fn read_span(file: &File, span: &std::ops::Range<u64>) -> std::io::Result<Vec<u8>> {
    let mut bytes = vec![0; (span.end - span.start) as usize];
    file.read_exact_at(&mut bytes, span.start)?;
    Ok(bytes)
}

fn delete_each(disk: &Disk, bucket: &str, objects: Vec<ObjectIdentifier>) -> Result<(Vec<String>, Vec<s3s::dto::Error>), DiskError> {
    disk.bucket(bucket)?;
    let (mut gone, mut kept) = (Vec::new(), Vec::new());
    for object in objects {
        let when = match object.e_tag {
            Some(etag) => Condition { exists: Some(Wanted::Tag(etag.into_value())), absent: None },
            None => Condition::default(),
        };
        match disk.delete(bucket, &object.key, &when) {
            Ok(()) => gone.push(object.key),
            Err(error) => {
                let error = S3Error::from(error);
                kept.push(s3s::dto::Error {
                    code: Some(error.code().as_str().to_owned()),
                    message: error.message().map(str::to_owned),
                    key: Some(object.key),
                    ..s3s::dto::Error::default()
                });
            }
        }
    }
    Ok((gone, kept))
}
