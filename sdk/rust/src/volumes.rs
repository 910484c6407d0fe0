//! Volumes and their snapshots.
//!
//! Owns these requests. What a task does with a volume stands in its job's spec.

use volley_jobspecs::api::{CollectedView, SnapshotRequest, VolumeRequest, VolumeView};

use crate::client::Client;
use crate::error::Error;
use crate::http::Call;

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
}
