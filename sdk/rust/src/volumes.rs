//! Volumes and their snapshots.
//!
//! Owns these requests. What a task does with a volume stands in its job's spec.

use volley_jobspecs::api::{CollectedView, ResizeRequest, SnapshotRequest, VerifiedView, VerifyLine, VolumeRequest, VolumeView};

use crate::client::Client;
use crate::error::Error;
use crate::http::Call;
use crate::lines::Lines;

impl Client {
    /// Every volume of the tenant.
    ///
    /// # Errors
    /// What the cluster refused, or no connection.
    pub async fn volumes(&self) -> Result<Vec<VolumeView>, Error> {
        self.json(&Call::get(&["volumes"], "list the volumes")).await
    }

    /// One volume.
    ///
    /// # Errors
    /// Code `not_found`.
    pub async fn volume(&self, name: &str) -> Result<VolumeView, Error> {
        self.json(&Call::get(&["volumes", name], format!("show the volume {name}"))).await
    }

    /// Makes a volume, empty or as a clone of a snapshot.
    ///
    /// # Errors
    /// Code `conflict` (the name is taken), `not_found` (no such snapshot), `bad_request`.
    pub async fn create_volume(&self, request: &VolumeRequest) -> Result<VolumeView, Error> {
        // The second time it would be an error: the name is taken.
        self.json(&Call::post(&["volumes"], format!("make the volume {}", request.name)).json(request).once()).await
    }

    /// Lets a volume grow that nobody writes; done when [`Client::volume`] has no `growing_to_bytes` any more.
    ///
    /// # Errors
    /// Code `not_found`, `conflict` (somebody has it, or it is larger), `bad_request`.
    pub async fn resize_volume(&self, name: &str, size_bytes: u64) -> Result<VolumeView, Error> {
        // Twice is the same as once.
        self.json(&Call::post(&["volumes", name, "resize"], format!("resize the volume {name}")).json(&ResizeRequest { size_bytes })).await
    }

    /// Removes a volume that nobody writes, with its snapshots.
    ///
    /// # Errors
    /// Code `not_found`, `conflict` (somebody has it).
    pub async fn remove_volume(&self, name: &str) -> Result<(), Error> {
        self.done(&Call::delete(&["volumes", name], format!("remove the volume {name}")).once()).await
    }

    /// Makes a snapshot of a volume as it was last accepted.
    ///
    /// # Errors
    /// Code `not_found`, `conflict` (the name is taken).
    pub async fn create_snapshot(&self, volume: &str, snapshot: &str) -> Result<VolumeView, Error> {
        let request = SnapshotRequest { name: snapshot.to_owned() };
        let call = Call::post(&["volumes", volume, "snapshots"], format!("make the snapshot {volume}@{snapshot}"));
        self.json(&call.json(&request).once()).await
    }

    /// Removes a snapshot's name. What jobs use stays as long as they do.
    ///
    /// # Errors
    /// Code `not_found`.
    pub async fn remove_snapshot(&self, volume: &str, snapshot: &str) -> Result<(), Error> {
        let call = Call::delete(&["volumes", volume, "snapshots", snapshot], format!("remove the snapshot {volume}@{snapshot}"));
        self.done(&call.once()).await
    }

    /// Deletes what volumes left in the bucket and nobody needs; for operators. `dry_run`: only says what would be done. It takes as long as it
    /// takes to read what is there.
    ///
    /// # Errors
    /// Code `forbidden`, `conflict` (somebody else is at it).
    pub async fn collect_volumes(&self, dry_run: bool) -> Result<CollectedView, Error> {
        let call = Call::post(&["gc"], "collect what volumes left").query("dryRun", dry_run.to_string()).once();
        self.send_body(&call, None, None).await?.json().await
    }

    /// Checks that everything a volume, or one of its snapshots, needs is there. `deep`: reads all that is stored. `progress` is told now and then how far it
    /// is. Damage is an answer, not an error.
    ///
    /// # Errors
    /// Code `not_found`, `overloaded`; no connection.
    pub async fn verify_volume(
        &self,
        name: &str,
        snapshot: Option<&str>,
        deep: bool,
        mut progress: impl FnMut(&VerifyLine),
    ) -> Result<VerifiedView, Error> {
        let doing = format!("verify the volume {name}");
        let call = Call::post(&["volumes", name, "verify"], doing.clone()).query("deep", deep).query_if("snapshot", snapshot);
        let mut lines = Lines::new(self.open(&call).await?);
        while let Some(line) = lines.next().await? {
            if line.is_empty() {
                continue;
            }
            let line: VerifyLine = serde_json::from_slice(&line).map_err(|error| lines.answer.unexpected(error.to_string()))?;
            match (line.ended, line.error) {
                (Some(ended), _) => return Ok(ended),
                // What the status would have said, had it not been sent before.
                (None, Some(body)) => return Err(Error::Refused { status: 503, doing, body }),
                (None, None) => progress(&VerifyLine { ended: None, error: None, ..line }),
            }
        }
        Err(lines.answer.broken("it ended before the verification did"))
    }
}
