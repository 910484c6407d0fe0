//! Commands in machines over the API: who is refused and why, and frames that go through as they are.

mod support;

use std::time::Duration;

use axum::http::Method;
use futures::{SinkExt, StreamExt};
use serde_json::{Value, json};
use support::{BOOTSTRAP, Cluster, World, success, worker_info, worker_with};
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::tungstenite::{Error, Message};
use tokio_util::sync::CancellationToken;
use volley_coordinator::config::CoordinatorConfig;
use volley_jobspecs::failure::FailureClass;
use volley_jobspecs::ids::{AttemptName, WorkerId};
use volley_jobspecs::spec;
use volley_jobspecs::validate::Features;
use volley_jobspecs::wire::plan::Isolation;
use volley_jobspecs::wire::report::{AttemptEnd, Ending};
use volley_jobspecs::wire::shell::{Body, Ended, Frame, Open, Opened, PIECE_BYTES_MAX, Refused, Tty};
use volley_jobspecs::{subjects, wire};

fn one_task(isolation: &str) -> Value {
    let mut task = json!({ "isolation": isolation, "command": ["echo"] });
    if isolation == "microvm" {
        task["image"] = json!("i");
    }
    json!({ "version": "volley/v1", "name": "exec", "items": { "count": 1 }, "task": task })
}

type Socket = tokio_tungstenite::WebSocketStream<tokio::net::TcpStream>;

/// Asks for a session; it, or the status and the error.
async fn ask(cluster: &Cluster, path: &str) -> Result<Socket, (u16, Value)> {
    ask_as(cluster, BOOTSTRAP, path).await
}

async fn ask_as(cluster: &Cluster, token: &str, path: &str) -> Result<Socket, (u16, Value)> {
    let addr = cluster.running.addr;
    let mut request = format!("ws://{addr}{path}").into_client_request().expect("a request");
    request.headers_mut().insert("authorization", format!("Bearer {token}").parse().expect("a header"));
    let stream = tokio::net::TcpStream::connect(addr).await.expect("a connection");
    match tokio_tungstenite::client_async(request, stream).await {
        Ok((socket, answer)) => {
            assert!(answer.headers().contains_key("volley-sequence"));
            Ok(socket)
        }
        Err(Error::Http(answer)) => {
            let body = answer.body().as_ref().map(|body| serde_json::from_slice(body).unwrap_or_default()).unwrap_or_default();
            Err((answer.status().as_u16(), body))
        }
        Err(other) => panic!("{other}"),
    }
}

/// A cluster with one worker that offers machines, and holds what it is given.
async fn start() -> Option<(Cluster, tokio::sync::mpsc::UnboundedReceiver<AttemptName>)> {
    let world = World::new().await?;
    let features = Features::with_isolation(&[spec::Isolation::Process, spec::Isolation::Microvm]);
    let config = CoordinatorConfig { features, ..world.config() };
    let cluster = world.cluster_with(config).await;
    let (names, begun) = tokio::sync::mpsc::unbounded_channel();
    let mut info = worker_info(4);
    info.isolation.push(Isolation::Microvm);
    worker_with(&cluster.world.nats.url, "w1", info, CancellationToken::new(), move |name| {
        _ = names.send(name);
        None
    })
    .await;
    Some((cluster, begun))
}

/// Answers wishes in the name of the worker.
async fn serve(cluster: &Cluster, answer: Opened) -> (async_nats::Client, tokio::sync::mpsc::UnboundedReceiver<Open>) {
    let client = async_nats::connect(&cluster.world.nats.url).await.expect("NATS");
    let worker = WorkerId::new("w1").expect("a name");
    let mut wishes = client.subscribe(subjects::shell(&worker)).await.expect("a subscription");
    // The server has it when it has what was sent behind it.
    let mut there = client.subscribe("there").await.expect("a subscription");
    client.publish("there", Vec::new().into()).await.expect("published");
    there.next().await.expect("it comes back");
    let (seen, opens) = tokio::sync::mpsc::unbounded_channel();
    let own = client.clone();
    tokio::spawn(async move {
        while let Some(wish) = wishes.next().await {
            _ = seen.send(wire::decode::<Open>("wish", &wish.payload).expect("a wish"));
            own.publish(wish.reply.expect("a reply"), wire::encode(&answer).into()).await.expect("published");
        }
    });
    (client, opens)
}

#[tokio::test(flavor = "multi_thread")]
async fn what_has_no_machine_is_refused_before_anything_is_opened() {
    let Some((cluster, mut begun)) = start().await else { return };
    let path = |job: &str, rest: &str| format!("/v1/jobs/{job}/tasks/0/exec{rest}");
    let status = async |path: String| match ask(&cluster, &path).await {
        Err((status, body)) => (status, body["message"].as_str().unwrap_or_default().to_owned()),
        Ok(_) => panic!("{path} was opened"),
    };
    assert_eq!(status(path("j999", "")).await.0, 404);
    let process = cluster.submit(&one_task("process")).await;
    let (code, message) = status(path(&process, "")).await;
    assert!(code == 409 && message.contains("only tasks with isolation \"microvm\""), "{code} {message}");
    begun.recv().await.expect("an attempt");
    let job = cluster.submit(&one_task("microvm")).await;
    let name = begun.recv().await.expect("an attempt");
    assert_eq!(status(format!("/v1/jobs/{job}/tasks/7/exec")).await.0, 404);
    assert_eq!(status(path(&job, "?attempt=3")).await.0, 404);
    for bad in ["?tty=x", "?tty=24", "?attempt=x", "?term=a%20b", "?cmd=", "?more=1"] {
        assert_eq!(status(path(&job, bad)).await.0, 400, "{bad}");
    }
    let long = "a".repeat(5_000);
    assert_eq!(status(path(&job, &format!("?cmd={long}"))).await.0, 400);
    // Not asked as a WebSocket, without a token, with another tenant's.
    let told = cluster.get(&path(&job, "")).await.expect(426).json();
    assert_eq!(told["code"], "upgrade_required");
    cluster.call(Method::GET, &path(&job, ""), None, &[], "").await.expect(401);
    cluster.post("/v1/tenants", json!({ "tenant": "acme" }).to_string()).await.expect(201);
    let token = cluster.post("/v1/tokens", json!({ "tenant": "acme" }).to_string()).await.expect(201).json();
    cluster.call(Method::GET, &path(&job, ""), token["token"].as_str(), &[], "").await.expect(404);
    // Nobody listens there.
    let (code, message) = status(path(&job, "")).await;
    assert!(code == 503 && message.contains("worker w1"), "{code} {message}");
    let (_client, mut opens) = serve(&cluster, Opened::No { kind: Refused::NotHere, text: "none".into() }).await;
    let (code, message) = status(path(&job, "")).await;
    assert!(code == 409 && message.contains("none; `volley explain "), "{code} {message}");
    assert_eq!(opens.recv().await.map(|open| open.name), Some(name));
    // One that succeeded left none.
    cluster.report(success(name)).await;
    cluster.ended(&job).await;
    let (code, message) = status(path(&job, "")).await;
    assert!(code == 409 && message.contains("succeeded"), "{code} {message}");
    cluster.stop().await;
}

async fn next(socket: &mut Socket) -> Message {
    tokio::time::timeout(Duration::from_secs(20), socket.next()).await.expect("in time").expect("more").expect("a message")
}

#[tokio::test(flavor = "multi_thread")]
async fn frames_go_through_as_they_are_and_both_ends_hear_of_the_end() {
    let Some((cluster, mut begun)) = start().await else { return };
    let job = cluster.submit(&one_task("microvm")).await;
    let name = begun.recv().await.expect("an attempt");
    let worker = WorkerId::new("w1").expect("a name");
    let (client, mut opens) = serve(&cluster, Opened::Yes).await;
    let mut heard = client.subscribe("volley.shell.w1.*").await.expect("a subscription");
    client.flush().await.expect("flushed");
    let path = format!("/v1/jobs/{job}/tasks/0/exec?attempt=1&tty=24x80&term=xterm&cmd=ls&cmd=-l%20a");
    let mut socket = ask(&cluster, &path).await.expect("it opens");
    let open = opens.recv().await.expect("a wish");
    let tty = Some(Tty { rows: 24, cols: 80 });
    assert_eq!(
        (open.name, open.argv, open.tty, open.term),
        (name, vec!["ls".to_owned(), "-l a".to_owned()], tty, Some("xterm".to_owned()))
    );
    let said = wire::encode(&Frame { number: 1, body: Body::Input(vec![0, 255].into()) });
    socket.send(Message::Binary(said.clone().into())).await.expect("sent");
    let message = heard.next().await.expect("a frame");
    assert_eq!((message.subject.to_string(), message.payload.to_vec()), (subjects::shell_to_worker(&worker, &open.session), said));
    let from = subjects::shell_from_worker(&worker, &open.session);
    for (number, body) in
        [(1, Body::Output { stderr: true, bytes: vec![7; 9].into() }), (2, Body::Ended(Ended { code: Some(3), ..Ended::default() }))]
    {
        let frame = wire::encode(&Frame { number, body });
        client.publish(from.clone(), frame.clone().into()).await.expect("published");
        assert_eq!(next(&mut socket).await, Message::Binary(frame.into()));
    }
    assert!(matches!(next(&mut socket).await, Message::Close(_)));
    // A client that goes without a word is told of.
    drop(ask(&cluster, &path).await.expect("it opens"));
    let message = tokio::time::timeout(Duration::from_secs(20), heard.next()).await.expect("in time").expect("a frame");
    let frame: Frame = wire::decode("frame", &message.payload).expect("a frame");
    assert!(frame.number == 0 && matches!(frame.body, Body::Failed(_)), "{frame:?}");
    // A coordinator that stops says so to both.
    let mut socket = ask(&cluster, &path).await.expect("it opens");
    cluster.stop.cancel();
    let Message::Binary(bytes) = next(&mut socket).await else { panic!("no frame") };
    let frame: Frame = wire::decode("frame", &bytes).expect("a frame");
    assert!(matches!(frame.body, Body::Failed(why) if why.contains("stopping")));
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kept_machine_is_ended_by_those_who_see_its_job() {
    let Some((cluster, mut begun)) = start().await else { return };
    let job = cluster.submit(&one_task("microvm")).await;
    let name = begun.recv().await.expect("an attempt");
    cluster.report(failure(name)).await;
    cluster.ended(&job).await;
    let path = format!("/v1/jobs/{job}/tasks/0/exec");
    let end = async |rest: &str| cluster.call(Method::DELETE, &format!("{path}{rest}"), Some(BOOTSTRAP), &[], "").await;
    let (_client, mut opens) = serve(&cluster, Opened::Yes).await;
    end("").await.expect(204);
    let open = opens.recv().await.expect("a wish");
    assert_eq!((open.name, open.end), (name, true));
    for (bad, code) in [("?attempt=x", 400), ("?attempt=9", 404), ("?tty=24x80", 400)] {
        end(bad).await.expect(code);
    }
    cluster.call(Method::DELETE, &path, None, &[], "").await.expect(401);
    cluster.stop().await;
}

/// It failed by itself.
fn failure(name: AttemptName) -> AttemptEnd {
    AttemptEnd { code: Some(1), ..AttemptEnd::bare(name, Ending::Failed(FailureClass::ExitCode), Isolation::Microvm) }
}

/// Why the coordinator ended a session: what it says last, which must be soon.
async fn end_of(frames: &mut async_nats::Subscriber) -> String {
    loop {
        let message = tokio::time::timeout(Duration::from_secs(5), frames.next()).await.expect("in time").expect("a frame");
        if let Frame { number: 0, body: Body::Failed(why) } = wire::decode("frame", &message.payload).expect("a frame") {
            return why;
        }
    }
}

/// As the client hears it.
async fn told(socket: &mut Socket) -> String {
    let Message::Binary(bytes) = next(socket).await else { panic!("no frame") };
    let frame: Frame = wire::decode("frame", &bytes).expect("a frame");
    assert!(matches!(next(socket).await, Message::Close(_)));
    let Frame { number: 0, body: Body::Failed(why) } = frame else { panic!("{frame:?}") };
    why
}

#[tokio::test(flavor = "multi_thread")]
async fn who_breaks_the_rules_or_may_not_any_more_is_cut_off_at_once() {
    let Some((cluster, mut begun)) = start().await else { return };
    cluster.post("/v1/tenants", json!({ "tenant": "acme" }).to_string()).await.expect(201);
    let token = cluster.post("/v1/tokens", json!({ "tenant": "acme" }).to_string()).await.expect(201).json();
    let (token, id) = (token["token"].as_str().expect("a token"), token["id"].as_str().expect("its id"));
    let job = cluster.call(Method::POST, "/v1/jobs", Some(token), &[], one_task("microvm").to_string()).await.expect(201).json();
    begun.recv().await.expect("an attempt");
    let worker = WorkerId::new("w1").expect("a name");
    let (client, mut opens) = serve(&cluster, Opened::Yes).await;
    let path = format!("/v1/jobs/{}/tasks/0/exec", job["job"].as_str().expect("a job"));
    let mut open = async || {
        let socket = ask_as(&cluster, token, &path).await.expect("it opens");
        let session = opens.recv().await.expect("a wish").session;
        let heard = client.subscribe(subjects::shell_to_worker(&worker, &session)).await.expect("a subscription");
        client.flush().await.expect("flushed");
        (socket, heard, subjects::shell_from_worker(&worker, &session))
    };
    // Its worker says nothing from the beginning; see below.
    let (mut silent, mut of_silent, _) = open().await;
    let since = std::time::Instant::now();
    for (what, says) in [(Message::Binary(b"nonsense".to_vec().into()), "frame of the client"), (Message::Text("{}".into()), "text")] {
        let (mut socket, mut heard, _) = open().await;
        socket.send(what).await.expect("sent");
        let (to_client, to_worker) = (told(&mut socket).await, end_of(&mut heard).await);
        assert!(to_client == to_worker && to_client.contains(says), "{to_client}");
    }
    // One that acknowledges what it never reads: what would wait for it is not held.
    let (_unread, mut heard, from) = open().await;
    for number in 1..2_000 {
        let body = Body::Output { stderr: false, bytes: vec![0; PIECE_BYTES_MAX].into() };
        client.publish(from.clone(), wire::encode(&Frame { number, body }).into()).await.expect("published");
    }
    let why = end_of(&mut heard).await;
    assert!(why.contains("takes what it does not take"), "{why}");
    let why = told(&mut silent).await;
    assert!(why.contains("its worker says nothing any more") && since.elapsed() > Duration::from_secs(15), "{why}");
    assert_eq!(end_of(&mut of_silent).await, why);
    let (mut socket, mut heard, _) = open().await;
    cluster.call(Method::DELETE, &format!("/v1/tokens/{id}"), Some(BOOTSTRAP), &[], "").await;
    let (to_client, to_worker) = (told(&mut socket).await, end_of(&mut heard).await);
    assert!(to_client == to_worker && to_client.contains("revoked"), "{to_client}");
    cluster.stop().await;
}
