//! A worker or its coordinator is killed at each step from a task's last commit to the record that what it wrote is accepted: whatever happened, a task that appends a line has
//! appended it once, in its volume or in both.
//!
//! The steps are found from outside: everything that goes to S3 and NATS passes the test, which holds a request or its answer while the process that waits for it is killed.
//! `VOLLEY_KILL_POINTS=all` tries every step; otherwise some of each kind.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use serde_json::{Value, json};

use crate::parts::{Part, Parts, TOKEN, ask, free_port, nats, s3};
use crate::support::cluster::{VOLLEY, nats_server, open_dir, write};
use crate::support::process::{Ran, start, until};

/// What is held, and never comes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Held {
    Request,
    Answer,
}

/// Where something is killed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Point {
    /// The worker, at the `n`th exchange of a head from its task's end on: last commit and letting go, volume by volume.
    Commit(usize, Held),
    /// The worker, as it reports.
    Report(Held),
    /// The coordinator, at the `n`th exchange of a head: what was accepted is promoted.
    Promote(usize, Held),
    /// The coordinator, when it has promoted and the log does not know.
    Record,
}

#[derive(Default)]
struct Catch {
    /// Which one is held, counted down; None: all pass.
    next: Option<(usize, Held)>,
    met: bool,
}

/// A way to S3 or NATS that can hold something.
#[derive(Clone)]
struct Way {
    address: SocketAddr,
    catch: Arc<Mutex<Catch>>,
    /// Another way that is closed when something was caught here.
    closes: Arc<Mutex<Option<Way>>>,
}

impl Way {
    fn new(server: SocketAddr, serve: fn(TcpStream, TcpStream, Way) -> Option<()>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let way = Self { address: listener.local_addr().unwrap(), catch: Arc::default(), closes: Arc::default() };
        let shared = way.clone();
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let (way, Ok(server)) = (shared.clone(), TcpStream::connect(server)) else { continue };
                std::thread::spawn(move || serve(client, server, way));
            }
        });
        way
    }

    fn catch(&self) -> MutexGuard<'_, Catch> {
        self.catch.lock().unwrap()
    }

    fn arm(&self, nth: usize, held: Held) {
        *self.catch() = Catch { next: Some((nth, held)), met: false };
    }

    fn pass(&self) {
        *self.catch() = Catch::default();
    }

    /// Something like what is waited for comes by: is it the one?
    fn comes(&self) -> Option<Held> {
        let mut catch = self.catch();
        let (nth, held) = catch.next?;
        if nth > 1 {
            catch.next = Some((nth - 1, held));
            return None;
        }
        // All that comes behind it is held as well.
        Some(held)
    }

    fn met(&self) {
        self.catch().met = true;
        if let Some(other) = &*self.closes.lock().unwrap() {
            other.arm(1, Held::Request);
        }
    }
}

/// Waits until whoever is there has gone.
fn until_gone(mut client: TcpStream) {
    let mut rest = [0; 4096];
    while client.read(&mut rest).is_ok_and(|count| count > 0) {}
}

/// One request of S3: those that replace a head may be held.
fn s3_request(mut client: TcpStream, mut server: TcpStream, way: Way) -> Option<()> {
    let mut request = Vec::new();
    let head = loop {
        if let Some(at) = request.windows(4).position(|four| four == b"\r\n\r\n") {
            break at + 4;
        }
        let mut part = [0; 16 << 10];
        let count = client.read(&mut part).ok().filter(|count| *count > 0)?;
        request.extend_from_slice(&part[..count]);
    };
    let text = String::from_utf8_lossy(&request[..head]).to_lowercase();
    let length = text.lines().find_map(|line| line.strip_prefix("content-length:")?.trim().parse::<usize>().ok()).unwrap_or(0);
    if text.contains("expect: 100-continue") {
        client.write_all(b"HTTP/1.1 100 Continue\r\n\r\n").ok()?;
    }
    let had = request.len();
    request.resize(head + length, 0);
    client.read_exact(&mut request[had.min(head + length)..]).ok()?;
    let line = text.lines().next().unwrap_or_default().to_owned();
    let path = line.split(' ').nth(1).unwrap_or_default().split('?').next().unwrap_or_default();
    let held = (line.starts_with("put ") && path.ends_with("/head") && text.contains("if-match:")).then(|| way.comes()).flatten();
    if held == Some(Held::Request) {
        way.met();
        until_gone(client);
        return None;
    }
    // The connection header is not signed: the server closes after its answer, which ends it for us.
    let first = request.windows(2).position(|two| two == b"\r\n")? + 2;
    server.write_all(&[&request[..first], b"connection: close\r\n", &request[first..]].concat()).ok()?;
    let mut answer = Vec::new();
    server.read_to_end(&mut answer).ok()?;
    if held == Some(Held::Answer) {
        way.met();
        // Whoever has closed the other way gets the answer: nothing that follows from it leaves the process.
        if way.closes.lock().unwrap().is_none() {
            until_gone(client);
            return None;
        }
    }
    client.write_all(&answer).ok()
}

/// A connection with NATS: what a worker reports to the log may be held, and all behind it; of others all.
fn nats_connection(mut client: TcpStream, mut server: TcpStream, way: Way) -> Option<()> {
    let (mut answers, mut to, back) = (server.try_clone().ok()?, client.try_clone().ok()?, way.clone());
    std::thread::spawn(move || {
        let mut part = vec![0; 64 << 10];
        while let Some(count) = answers.read(&mut part).ok().filter(|count| *count > 0) {
            let silent = back.catch().met;
            if !silent && to.write_all(&part[..count]).is_err() {
                break;
            }
        }
        let _ = to.shutdown(Shutdown::Both);
    });
    let mut part = vec![0; 64 << 10];
    while let Some(count) = client.read(&mut part).ok().filter(|count| *count > 0) {
        let bytes = &part[..count];
        let reports = bytes.windows(21).any(|window| window == b"PUB volley.log.report");
        let leads = bytes.windows(21).any(|window| window == b"PUB volley.log.leader");
        let held = (reports || leads).then(|| way.comes()).flatten();
        if held.is_some() {
            way.catch().met = true;
        }
        if held == Some(Held::Request) {
            until_gone(client);
            break;
        }
        server.write_all(bytes).ok()?;
    }
    let _ = server.shutdown(Shutdown::Both);
    None
}

/// A coordinator and a worker, each with ways of its own.
struct World<'a> {
    dir: &'a Path,
    coordinator: Parts<'a>,
    worker: Parts<'a>,
    /// S3 and NATS of the coordinator, S3 and NATS of the worker.
    ways: [Way; 4],
    running: [Option<Part>; 2],
    port: u16,
}

impl World<'_> {
    fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    fn start_coordinator(&mut self) {
        self.running[0] = Some(self.coordinator.coordinator("c1", self.port));
    }

    fn start_worker(&mut self) {
        self.running[1] = Some(self.worker.worker("w1", &["--isolation", "process"]));
    }

    fn volley(&self, args: &[&str]) -> Ran {
        let mut command = Command::new(VOLLEY);
        command.args(args).args(["--url", &self.url()]).env("VOLLEY_TOKEN", TOKEN).current_dir(self.dir);
        start(command).wait()
    }

    fn ready(&self) {
        until("the worker has volumes", || {
            ask(&self.url(), "/v1/cluster").is_some_and(|view| view["level"].as_u64() >= Some(7))
                && ask(&self.url(), "/v1/workers")
                    .is_some_and(|rows| rows.as_array().unwrap().iter().any(|w| w["state"] == "ready" && w["volumes"] == "yes"))
        });
    }

    fn submit(&self, volumes: &Value, command: &str) -> String {
        let retry = json!({ "infraAttempts": 10, "backoff": { "initial": "100ms", "cap": "200ms" } });
        let task = json!({ "isolation": "process", "command": command, "volumes": volumes, "retry": retry });
        let spec = json!({ "version": "volley/v1", "name": "line", "task": task }).to_string();
        let spec = write(&self.dir.join("spec.json"), &spec);
        self.volley(&["submit", &spec, "-o", "json", "--quiet"]).exits(0).json()["job"].as_str().unwrap().to_owned()
    }

    /// What the only task of a job that succeeds said.
    fn said(&self, job: &str) -> String {
        until("the job has ended", || ask(&self.url(), &format!("/v1/jobs/{job}")).is_some_and(|job| job["state"] == "succeeded"));
        let rows = self.volley(&["results", job, "-o", "json"]).exits(0).lines();
        rows[0]["stdoutTail"].as_str().unwrap_or_default().to_owned()
    }

    /// One task appends its job's number, and something is killed; returns the job.
    fn line_with_a_kill(&mut self, point: Point, volumes: &Value, names: &[&str]) -> String {
        let (go, there) = (self.dir.join("go"), self.dir.join("anybodys/there"));
        let _ = std::fs::remove_file(&go);
        let _ = std::fs::remove_file(&there);
        let append: Vec<String> = names.iter().map(|name| format!("echo $VOLLEY_JOB >> {name}/lines")).collect();
        let wait = format!("{}; touch {}; until [ -e {} ]; do sleep 0.05; done", append.join("; "), there.display(), go.display());
        let job = self.submit(volumes, &wait);
        until("the task has its line", || there.exists());
        let [s3_of_coordinator, nats_of_coordinator, s3_of_worker, nats_of_worker] = self.ways.clone();
        let way = match point {
            Point::Commit(nth, held) => {
                s3_of_worker.arm(nth, held);
                s3_of_worker
            }
            Point::Report(held) => {
                nats_of_worker.arm(1, held);
                nats_of_worker
            }
            Point::Promote(nth, held) => {
                s3_of_coordinator.arm(nth, held);
                s3_of_coordinator
            }
            Point::Record => {
                *s3_of_coordinator.closes.lock().unwrap() = Some(nats_of_coordinator);
                s3_of_coordinator.arm(names.len(), Held::Answer);
                s3_of_coordinator
            }
        };
        std::fs::write(&go, "").unwrap();
        until(&format!("{point:?} is met"), || way.catch().met);
        if point == Point::Record {
            std::thread::sleep(Duration::from_millis(300));
        }
        let killed = usize::from(matches!(point, Point::Commit(..) | Point::Report(_)));
        self.running[killed] = None;
        for way in &self.ways {
            way.pass();
            *way.closes.lock().unwrap() = None;
        }
        if killed == 0 {
            self.start_coordinator()
        } else {
            self.start_worker()
        }
        job
    }
}

/// The steps for a task with this many volumes.
fn points(volumes: usize) -> Vec<Point> {
    let both = [Held::Request, Held::Answer];
    let commits = (1..=2 * volumes).flat_map(|nth| both.map(|held| Point::Commit(nth, held)));
    let promotions = (1..=volumes).flat_map(|nth| both.map(|held| Point::Promote(nth, held)));
    let all: Vec<Point> = commits.chain(both.map(Point::Report)).chain(promotions).chain([Point::Record]).collect();
    if std::env::var("VOLLEY_KILL_POINTS").is_ok_and(|which| which == "all") {
        return all;
    }
    let some = |point: &Point| match (volumes, *point) {
        (1, Point::Commit(nth, held)) => (nth == 1) == (held == Held::Request),
        (1, _) => true,
        (_, Point::Commit(nth, held)) => matches!((nth, held), (2, Held::Answer) | (3, Held::Request)),
        (_, Point::Promote(nth, held)) => (nth == 1) == (held == Held::Answer),
        (_, Point::Report(held)) => held == Held::Answer,
        (_, Point::Record) => true,
    };
    all.into_iter().filter(some).collect()
}

fn lines_are_appended_once(names: &[&str]) {
    if nats_server().is_none() || !rustix::process::geteuid().is_root() || !Path::new("/dev/fuse").exists() {
        eprintln!("skipped: it takes nats-server, root and /dev/fuse");
        return;
    }
    let (dir, runtime) = (open_dir(), tokio::runtime::Runtime::new().unwrap());
    let store = runtime.block_on(s3(dir.path()));
    let nats_port = free_port();
    let _nats = nats(dir.path(), nats_port);
    until("NATS is up", || TcpStream::connect(("127.0.0.1", nats_port)).is_ok());
    let anybodys = dir.path().join("anybodys");
    std::fs::create_dir(&anybodys).unwrap();
    std::fs::set_permissions(&anybodys, std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
    let keys = write(&dir.path().join("keys"), &"ab".repeat(32));
    std::fs::set_permissions(&keys, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    let s3_server: SocketAddr = store.endpoint().strip_prefix("http://").unwrap().parse().unwrap();
    let nats_server: SocketAddr = ([127, 0, 0, 1], nats_port).into();
    let ways = [(); 2].map(|()| [Way::new(s3_server, s3_request), Way::new(nats_server, nats_connection)]);
    let parts = |[s3, nats]: &[Way; 2]| Parts {
        dir: dir.path(),
        nats: format!("nats://{}", nats.address),
        s3: format!("http://{}", s3.address),
        env: vec![("VOLLEY_VOLUME_KEYS", keys.clone())],
    };
    let (coordinator, worker) = (parts(&ways[0]), parts(&ways[1]));
    let [[a, b], [c, d]] = ways;
    let mut world = World { dir: dir.path(), coordinator, worker, ways: [a, b, c, d], running: [None, None], port: free_port() };
    world.start_coordinator();
    world.start_worker();
    world.ready();
    let volumes: Vec<Value> = names.iter().map(|name| json!({ "volume": name, "path": name, "access": "rw", "size": "16MiB" })).collect();
    let volumes = Value::from(volumes);
    let read: Vec<String> = names.iter().map(|name| format!("cat {name}/lines")).collect();
    let mut expected = String::new();
    for point in points(names.len()) {
        let begun = std::time::Instant::now();
        let job = world.line_with_a_kill(point, &volumes, names);
        world.said(&job);
        expected += &format!("{job}\n");
        // Whoever writes next sees it once, in all of them.
        let seen = world.said(&world.submit(&volumes, &read.join("; ")));
        assert_eq!(seen, expected.repeat(names.len()), "killed at {point:?}");
        println!("{} volumes, killed at {point:?}: one line ({:.1} s)", names.len(), begun.elapsed().as_secs_f64());
    }
}

#[test]
fn a_line_is_appended_once_to_one_volume_wherever_something_is_killed() {
    lines_are_appended_once(&["a"]);
}

#[test]
fn a_line_is_appended_once_to_both_volumes_wherever_something_is_killed() {
    lines_are_appended_once(&["a", "b"]);
}
