//! `volley log`: a record that stops `volley up` is looked at and passed over, though the NATS of that cluster ended with it.

use serde_json::{Value, json};

use crate::support::Cluster;
use crate::support::process::until;

#[tokio::test(flavor = "multi_thread")]
async fn up_stops_at_a_bad_record_and_goes_on_behind_it() {
    let Some(mut cluster) = Cluster::up() else { return };
    let job = cluster.submit(&cluster.spec(json!({ "count": 3 }), json!({ "command": "echo $VOLLEY_TASK_INDEX" }), json!({})));
    cluster.ended(&job);
    let before = (cluster.job(&job), cluster.results(&job));
    let secrets: Value = serde_json::from_slice(&std::fs::read(cluster.path("cluster/secrets.json")).unwrap()).unwrap();
    let ports = std::fs::read_dir(cluster.path("cluster/nats/ports")).unwrap().next().unwrap().unwrap().path();
    let ports: Value = serde_json::from_slice(&std::fs::read(ports).unwrap()).unwrap();
    let password = secrets["nats_password"].as_str().unwrap().to_owned();
    let options = async_nats::ConnectOptions::with_user_and_password("volley".into(), password);
    let client = options.connect(ports["nats"][0].as_str().unwrap()).await.unwrap();
    let jetstream = async_nats::jetstream::new(client);
    let published = jetstream.publish("volley.log.control.default", vec![0xff, 0x00].into()).await.unwrap();
    let bad = published.await.unwrap().sequence.to_string();

    until("volley up has ended", || cluster.has_ended());
    let dir = cluster.path("cluster").display().to_string();
    let said = cluster.log();
    assert!(
        said.contains(&format!("record {bad} can't be read")) && said.contains(&format!("`volley log --dir {dir} skip {bad}`")),
        "{said}"
    );
    let shown = cluster.volley(&["log", "--dir", &dir, "show", "--from", &bad]).exits(0).json();
    assert_eq!((&shown["sequence"].to_string(), &shown["bytes"]), (&bad, &json!("ff00")), "{shown}");
    cluster.volley(&["log", "--dir", &dir, "skip", "999999"]).exits(66);
    let refused = cluster.volley(&["log", "--dir", &dir, "skip", &job[1..]]).exits(65).stderr;
    assert!(refused.contains("can be read") && refused.contains("--force"), "{refused}");
    cluster.volley(&["log", "--dir", &dir, "skip", &bad]).exits(0);

    cluster.start();
    assert_eq!((cluster.job(&job), cluster.results(&job)), before);
    let job = cluster.submit(&cluster.spec(json!({ "count": 3 }), json!({ "command": "true" }), json!({})));
    assert_eq!(cluster.ended(&job)["state"], "succeeded");
}
