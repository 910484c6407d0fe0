//! Submits a job of a hundred tasks and prints each result as its task finishes.
//!
//! Run against the cluster of `volley up`: `cargo run -p volley-sdk --example results`.

use volley_sdk::jobspecs::api::TaskState;
use volley_sdk::{Client, Error, ResultsQuery};

const SPEC: &str = r#"{
  "version": "volley/v1",
  "name": "squares",
  "items": { "range": { "from": 1, "to": 101 } },
  "task": { "isolation": "process", "command": "echo $(( ${item} * ${item} ))", "timeouts": { "run": "10s" } }
}"#;

#[tokio::main]
async fn main() -> Result<(), Error> {
    let client = Client::from_env()?;
    let submitted = client.submit(SPEC.to_owned()).await?;
    println!("{} with {} tasks", submitted.job, submitted.tasks);

    // Survives restarts of the coordinator: the stream goes on behind the last row it gave.
    let mut results = client.results(submitted.job, ResultsQuery::follow());
    while let Some(row) = results.next().await {
        let row = row?;
        match row.state {
            TaskState::Succeeded => println!("{:>3}  {}", row.index, row.stdout_tail.unwrap_or_default().trim_end()),
            _ => println!("{:>3}  failed: {}", row.index, row.message.unwrap_or_default()),
        }
    }
    println!("ended as {:?}", client.job(submitted.job).await?.state);
    Ok(())
}
