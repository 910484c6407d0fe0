//! A registry on this machine: a small one that misbehaves as it is told, and Debian's.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use volley_jobspecs::image::Reference;
use volley_worker::image::oci::Digest;
use volley_worker::image::registry::Credentials;
use volley_worker::image::{ImageNote, ImportError, Limits, Source, Store, import};

use super::made::{Made, Packing, sha256};
use super::program;

/// What goes wrong.
#[derive(Clone, Copy, Default, PartialEq)]
enum Trouble {
    #[default]
    None,
    /// One byte of the layer is wrong, this many times.
    Damaged(usize),
    /// Each answer with the layer ends after a third of it; parts can be asked for.
    Cut { parts: bool },
    /// The layer is longer than announced.
    Longer,
    /// What is asked for by digest is another manifest.
    OtherManifest,
    /// Only with a token, which only a user gets.
    Token,
    /// Only with a password.
    Basic,
    /// The first answers are 503.
    Busy(usize),
    /// It asks who we are in a way that is not known here.
    OddScheme,
}

struct Server {
    address: String,
    asked: Arc<Mutex<Vec<String>>>,
}

impl Server {
    fn start(made: &Made, trouble: Trouble) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let asked: Arc<Mutex<Vec<String>>> = Arc::default();
        let layer = sha256(&made.packed(Packing::Gzip)[0]);
        let mut blobs: BTreeMap<String, Vec<u8>> = made.blobs(Packing::Gzip).into_iter().collect();
        let manifest = made.manifest(Packing::Gzip);
        // The tag names an index.
        let entry = |os: &str, digest: &str| {
            let size = manifest.len();
            format!(
                r#"{{"mediaType":"application/vnd.oci.image.manifest.v1+json","digest":"{digest}","size":{size},"platform":{{"os":"{os}","architecture":"amd64"}}}}"#
            )
        };
        let index =
            format!(r#"{{"schemaVersion":2,"manifests":[{},{}]}}"#, entry("windows", &sha256(b"w")), entry("linux", &sha256(&manifest)));
        if trouble == Trouble::OtherManifest {
            blobs.insert(sha256(&manifest), b"{}".to_vec());
        }
        let served = Served { blobs, layer, index: index.into_bytes(), trouble: Mutex::new(trouble), address: address.clone() };
        let (served, log) = (Arc::new(served), asked.clone());
        // Ends with the test's process.
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (served, log) = (served.clone(), log.clone());
                std::thread::spawn(move || served.answer(stream, &log));
            }
        });
        Self { address, asked }
    }

    fn source(&self, credentials: Option<Credentials>) -> Source {
        let reference = Reference::parse(&format!("{}/a/b:tag", self.address)).unwrap();
        Source::Registry { reference, plain_http: false, credentials }
    }

    fn count(&self, part: &str) -> usize {
        self.asked.lock().unwrap().iter().filter(|line| line.contains(part)).count()
    }
}

struct Served {
    blobs: BTreeMap<String, Vec<u8>>,
    layer: String,
    index: Vec<u8>,
    trouble: Mutex<Trouble>,
    address: String,
}

impl Served {
    /// Answers one request, and closes.
    fn answer(&self, mut stream: TcpStream, log: &Mutex<Vec<String>>) {
        let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
        let first = lines.next().unwrap().unwrap();
        let headers: Vec<String> = lines.map_while(Result::ok).take_while(|line| !line.is_empty()).collect();
        let header = |name: &str| {
            headers
                .iter()
                .find_map(|line| line.to_lowercase().strip_prefix(&format!("{name}: ")).map(|_| line[name.len() + 2..].to_owned()))
        };
        let path = first.split(' ').nth(1).unwrap().to_owned();
        let from = header("range").map(|range| range.trim_start_matches("bytes=").trim_end_matches('-').parse::<usize>().unwrap());
        log.lock().unwrap().push(format!("{path} from {}", from.unwrap_or(0)));
        let (status, extra, body, sent) = self.decide(&path, header("authorization").as_deref(), from);
        let head = format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n{extra}\r\n", body.len());
        let _ = stream.write_all(head.as_bytes());
        let _ = stream.write_all(&body[..sent]);
    }

    /// Status, more headers, body, and how much of it is sent.
    fn decide(&self, path: &str, authorization: Option<&str>, from: Option<usize>) -> (&'static str, String, Vec<u8>, usize) {
        let whole = |status, extra: &str, body: Vec<u8>| (status, extra.to_owned(), body.clone(), body.len());
        let mut trouble = self.trouble.lock().unwrap();
        if path.starts_with("/token?") {
            let asked = path.contains("scope=repository%3Aa%2Fb%3Apull") && path.contains("service=me");
            return match authorization {
                Some("Basic bWU6c2VjcmV0") if asked => whole("200 OK", "", br#"{"token":"abc"}"#.to_vec()),
                _ => whole("401 Unauthorized", "", vec![]),
            };
        }
        match &mut *trouble {
            Trouble::Token if authorization != Some("Bearer abc") => {
                let extra = format!(
                    "WWW-Authenticate: Bearer realm=\"http://{}/token\",service=\"me\",scope=\"repository:a/b:pull\"\r\n",
                    self.address
                );
                return whole("401 Unauthorized", &extra, vec![]);
            }
            Trouble::Basic if authorization != Some("Basic bWU6c2VjcmV0") => {
                return whole("401 Unauthorized", "WWW-Authenticate: Basic realm=\"x\"\r\n", vec![]);
            }
            Trouble::OddScheme => return whole("401 Unauthorized", "WWW-Authenticate: Digest realm=\"x\"\r\n", vec![]),
            Trouble::Busy(left) if *left > 0 => {
                *left -= 1;
                return whole("503 Service Unavailable", "", vec![]);
            }
            _ => {}
        }
        if path == "/v2/a/b/manifests/tag" {
            return whole("200 OK", "", self.index.clone());
        }
        let name = path.rsplit('/').next().unwrap();
        let Some(mut bytes) = self.blobs.get(name).cloned() else { return whole("404 Not Found", "", vec![]) };
        if name != self.layer {
            return whole("200 OK", "", bytes);
        }
        match &mut *trouble {
            Trouble::Damaged(left) if *left > 0 => {
                *left -= 1;
                bytes[10] ^= 1;
            }
            Trouble::Longer => bytes.push(0),
            Trouble::Cut { parts } => {
                let third = bytes.len() / 3 + 1;
                let begin = from.filter(|_| *parts).unwrap_or(0);
                if !*parts && from.is_some() {
                    // The second time it goes well.
                    return whole("200 OK", "", bytes);
                }
                let rest = bytes[begin..].to_vec();
                let sent = third.min(rest.len());
                return (if begin > 0 { "206 Partial Content" } else { "200 OK" }, String::new(), rest, sent);
            }
            _ => {}
        }
        whole("200 OK", "", bytes)
    }
}

fn made() -> Made {
    let text: String = (0..3000).map(|n| format!("{n} ")).collect();
    Made::layers(&[&[("etc/", ""), ("etc/a", &text)]])
}

fn me() -> Option<Credentials> {
    Some(Credentials { user: "me".to_owned(), password: "secret".to_owned() })
}

struct Pulled {
    result: Result<ImageNote, ImportError>,
    server: Server,
    dir: tempfile::TempDir,
}

async fn pulled(trouble: Trouble, credentials: Option<Credentials>) -> Pulled {
    let server = Server::start(&made(), trouble);
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    let result = import(&store, server.source(credentials), None, Limits::default()).await;
    if result.is_err() {
        let left: usize = ["roots", "images", "tmp"].map(|part| std::fs::read_dir(dir.path().join(part)).unwrap().count()).iter().sum();
        assert_eq!(left, 0);
    }
    Pulled { result, server, dir }
}

fn refused(pulled: &Pulled) -> String {
    pulled.result.as_ref().unwrap_err().to_string()
}

#[tokio::test]
async fn an_image_comes_by_its_index() {
    let one = pulled(Trouble::None, None).await;
    let note = one.result.unwrap();
    assert_eq!(note.digest, Digest::parse(&sha256(&made().manifest(Packing::Gzip))).unwrap());
    // The second time its blobs are there.
    let store = Store::open(one.dir.path()).unwrap();
    import(&store, one.server.source(None), None, Limits::default()).await.unwrap();
    assert_eq!(one.server.count(&sha256(&made().packed(Packing::Gzip)[0])), 1);
}

#[tokio::test]
async fn a_damaged_blob_is_fetched_once_more_and_never_kept() {
    assert!(pulled(Trouble::Damaged(1), None).await.result.is_ok());
    let one = pulled(Trouble::Damaged(9), None).await;
    let layer = sha256(&made().packed(Packing::Gzip)[0]);
    assert!(refused(&one).contains(&format!("{layer} was damaged")), "{}", refused(&one));
    assert_eq!(one.server.count(&layer), 2);
    assert!(!one.dir.path().join("blobs").join(&layer[7..]).exists());
}

#[tokio::test]
async fn a_cut_transfer_goes_on_where_it_ended() {
    let one = pulled(Trouble::Cut { parts: true }, None).await;
    one.result.as_ref().unwrap();
    let layer = &made().packed(Packing::Gzip)[0];
    assert_eq!(one.server.count(&sha256(layer)), 3);
    assert_eq!(one.server.count(&format!("from {}", layer.len() / 3 + 1)), 1);
    // A server that knows no parts sends all of it again.
    let one = pulled(Trouble::Cut { parts: false }, None).await;
    one.result.as_ref().unwrap();
    assert_eq!(one.server.count(&sha256(layer)), 2);
}

#[tokio::test]
async fn what_was_not_announced_is_refused() {
    let one = pulled(Trouble::Longer, None).await;
    assert!(refused(&one).contains("were announced"), "{}", refused(&one));
    let one = pulled(Trouble::OtherManifest, None).await;
    assert!(refused(&one).contains("was damaged: what came has the digest"), "{}", refused(&one));
    let server = Server::start(&made(), Trouble::None);
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    let reference = Reference::parse(&format!("{}/a/b:other", server.address)).unwrap();
    let source = Source::Registry { reference, plain_http: false, credentials: None };
    let why = import(&store, source, None, Limits::default()).await.unwrap_err().to_string();
    assert!(why.contains("/v2/a/b/manifests/other: the registry doesn't have it (404"), "{why}");
}

#[tokio::test]
async fn credentials_are_given_where_they_are_asked_for() {
    let one = pulled(Trouble::Token, me()).await;
    one.result.as_ref().unwrap();
    assert_eq!(one.server.count("/token?"), 1, "one token is enough");
    pulled(Trouble::Basic, me()).await.result.unwrap();
    for trouble in [Trouble::Token, Trouble::Basic] {
        let one = pulled(trouble, None).await;
        assert!(refused(&one).contains("does it want credentials?"), "{}", refused(&one));
    }
    let one = pulled(Trouble::OddScheme, me()).await;
    assert!(refused(&one).contains("neither Basic nor Bearer") && !refused(&one).contains("secret"), "{}", refused(&one));
}

#[tokio::test]
async fn a_busy_registry_is_asked_again() {
    let one = pulled(Trouble::Busy(2), None).await;
    one.result.as_ref().unwrap();
    assert_eq!(one.server.count("manifests/tag"), 3);
}

/// Debian's registry, with its blobs in a directory of its own.
struct Debian {
    child: Child,
    address: String,
    _dir: tempfile::TempDir,
}

impl Debian {
    async fn start() -> Option<Self> {
        let program = program("docker-registry")?;
        let dir = tempfile::tempdir().unwrap();
        let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
        let config =
            format!("version: 0.1\nstorage:\n  filesystem:\n    rootdirectory: {}\nhttp:\n  addr: {address}\n", dir.path().display());
        let file = dir.path().join("config.yml");
        std::fs::write(&file, config).unwrap();
        let child = Command::new(program).arg("serve").arg(file).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let registry = Self { child, address, _dir: dir };
        let begun = Instant::now();
        while reqwest::get(format!("http://{}/v2/", registry.address)).await.is_err() {
            assert!(begun.elapsed() < Duration::from_secs(30), "docker-registry doesn't answer");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Some(registry)
    }

    async fn push(&self, made: &Made) {
        let client = reqwest::Client::new();
        let base = format!("http://{}/v2/a/b", self.address);
        for (digest, bytes) in made.blobs(Packing::Gzip) {
            let begun = client.post(format!("{base}/blobs/uploads/")).send().await.unwrap();
            let place = begun.headers()["location"].to_str().unwrap().to_owned();
            let done = client.put(format!("{place}&digest={digest}")).body(bytes).send().await.unwrap();
            assert!(done.status().is_success(), "{done:?}");
        }
        let kind = "application/vnd.oci.image.manifest.v1+json";
        let put = client
            .put(format!("{base}/manifests/tag"))
            .header("content-type", kind)
            .body(made.manifest(Packing::Gzip))
            .send()
            .await
            .unwrap();
        assert!(put.status().is_success(), "{put:?}");
    }
}

impl Drop for Debian {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[tokio::test]
async fn an_image_comes_from_a_real_registry() {
    // Whoever came first has set the same one.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let Some(registry) = Debian::start().await else { return };
    let made = made();
    registry.push(&made).await;
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    let manifest = sha256(&made.manifest(Packing::Gzip));
    for name in [":tag".to_owned(), format!("@{manifest}")] {
        let reference = Reference::parse(&format!("{}/a/b{name}", registry.address)).unwrap();
        let source = Source::Registry { reference, plain_http: false, credentials: None };
        let note = import(&store, source, None, Limits::default()).await.unwrap();
        assert_eq!(note.digest.to_string(), manifest);
        assert!(store.root_note(&note.root).unwrap().is_some());
    }
}
