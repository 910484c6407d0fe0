//! Running cases in tiers.
//!
//! Owns which tiers there are here, a worker with all of them, as many attempts at once as it takes, and comparing what came out.

use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use volley_guest::initramfs;
use volley_jobspecs::ids::{BundleId, JobId, TenantId};
use volley_jobspecs::keys;
use volley_jobspecs::parse::parse_and_validate;
use volley_jobspecs::validate::Features;
use volley_jobspecs::wire::plan::Isolation;
use volley_jobspecs::wire::record::Run;
use volley_jobspecs::wire::report::{AttemptEnd, Ending};
use volley_jobspecs::wire::work::{AtStage, Order};

use crate::cases::Case;
use crate::host::{self, Host};
use crate::image;
use crate::support::{World, text};

/// Attempts under way, one a slot: what waits for long is handed back.
const AT_ONCE: usize = 2;
/// An attempt is not waited for longer.
const END_WAIT: Duration = Duration::from_secs(120);
/// Memory of every task: one template serves all of them, and limits are in force in every case.
const MEMORY: &str = "64MiB";
/// The first user of slots.
const USER: u32 = 80_000;

/// Where a task runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tier {
    Process,
    Container,
    Microvm,
}

impl Tier {
    pub const ALL: [Self; 3] = [Self::Process, Self::Container, Self::Microvm];

    pub fn name(self) -> &'static str {
        match self {
            Self::Process => "process",
            Self::Container => "container",
            Self::Microvm => "microvm",
        }
    }

    fn isolation(self) -> Isolation {
        match self {
            Self::Process => Isolation::Process,
            Self::Container => Isolation::Container,
            Self::Microvm => Isolation::Microvm,
        }
    }
}

/// How a case came out in a tier.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// As in every other tier, and as expected.
    Same,
    /// Otherwise, which the case lists.
    Differs(&'static str),
    /// It was not run.
    Skipped(String),
    /// Not as expected, or not as in another tier.
    Failed(String),
}

impl Verdict {
    pub fn word(&self) -> &'static str {
        match self {
            Self::Same => "ok",
            Self::Differs(_) => "differs",
            Self::Skipped(_) => "skipped",
            Self::Failed(_) => "FAILED",
        }
    }
}

/// What came out of a case in a tier.
#[derive(Debug)]
pub struct Seen {
    pub ends: Vec<AttemptEnd>,
    /// Output files of each attempt: path and bytes, in order.
    pub files: Vec<Vec<(String, Vec<u8>)>>,
    /// Stdout of each attempt: all that was kept.
    pub stdout: Vec<Vec<u8>>,
}

impl Seen {
    pub fn end(&self) -> &AttemptEnd {
        &self.ends[0]
    }

    pub fn out(&self) -> String {
        self.ends.iter().map(|end| text(&end.stdout)).collect()
    }

    pub fn err(&self) -> String {
        text(&self.end().stderr)
    }

    pub fn message(&self) -> &str {
        self.end().message.as_deref().unwrap_or_default()
    }

    pub fn file(&self, path: &str) -> Option<&[u8]> {
        self.files[0].iter().find(|(found, _)| found == path).map(|(_, bytes)| bytes.as_slice())
    }

    pub fn paths(&self) -> Vec<&str> {
        self.files[0].iter().map(|(path, _)| path.as_str()).collect()
    }

    /// For people.
    fn shown(&self) -> String {
        let end = self.end();
        let cut = |text: String| text.chars().take(300).collect::<String>();
        format!(
            "{:?}, code {:?}, message {:?}, stdout {:?}, stderr {:?}, result {:?}, files {:?}, {:?}",
            end.ending,
            end.code,
            end.message,
            cut(self.out()),
            cut(self.err()),
            end.result.as_ref().map(|result| String::from_utf8_lossy(result).into_owned()),
            self.paths(),
            end.timing
        )
    }

    /// What must be the same in every tier.
    fn common(&self, case: &Case) -> String {
        let ends: Vec<(Ending, Option<i32>)> =
            if case.free { Vec::new() } else { self.ends.iter().map(|end| (end.ending, end.code)).collect() };
        let results: Vec<Option<String>> =
            self.ends.iter().map(|end| end.result.as_ref().map(|result| String::from_utf8_lossy(result).into_owned())).collect();
        let stdout = if case.varies { Vec::new() } else { self.ends.iter().map(|end| text(&end.stdout)).collect() };
        let paths: Vec<Vec<(&String, usize)>> =
            self.files.iter().map(|files| files.iter().map(|(path, bytes)| (path, bytes.len())).collect()).collect();
        format!("{ends:?} {results:?} {stdout:?} {paths:?}")
    }
}

/// A worker with the tiers of this host.
pub struct Place {
    world: World,
    image: String,
    tiers: Vec<(Tier, Option<String>)>,
}

impl Place {
    /// Starts one. None where not one of `wanted` can run; what is missing is printed.
    pub async fn find(wanted: &[Tier], runtime: Option<&str>) -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: tasks have users of their own, and images are mounted, only where the worker is root");
            return None;
        }
        let dir = tempfile::tempdir().unwrap();
        // Slots' users pass through.
        std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o711)).unwrap();
        let image = image::make(&dir.path().join("images")).await;
        let (image, no_image) = image.map_or_else(|why| (String::new(), Some(why)), |image| (image, None));
        let mut tiers: Vec<(Tier, Option<String>)> = wanted
            .iter()
            .map(|tier| match tier {
                Tier::Process => (*tier, None),
                Tier::Container => (*tier, no_image.clone()),
                Tier::Microvm => (*tier, no_image.clone().or_else(|| no_machines().err())),
            })
            .collect();
        // The suite itself is worth its time with one tier, and a runtime's smoke only with that runtime.
        let isolation: Vec<Isolation> = tiers.iter().filter(|(_, why)| why.is_none()).map(|(tier, _)| tier.isolation()).collect();
        let isolation = if isolation.contains(&Isolation::Process) { isolation } else { [isolation, vec![Isolation::Process]].concat() };
        let world = World::start_in(dir, |config| {
            config.isolation = isolation;
            config.cgroups = true;
            config.stream_bytes_max = 1 << 20;
            (config.task_user, config.task_user_per_slot) = (Some((USER, USER)), true);
            config.containers.runtime = runtime.map(PathBuf::from);
        })
        .await;
        let offered = world.last_beat().info.isolation;
        for (tier, why) in &mut tiers {
            if why.is_none() && !offered.contains(&tier.isolation()) {
                *why = Some("the worker does not offer it; its log says why".to_owned());
            }
        }
        for (tier, why) in &tiers {
            if let Some(why) = why {
                eprintln!("skipped: {} {}: {why}", tier.name(), runtime.unwrap_or_default());
            }
        }
        if tiers.iter().all(|(_, why)| why.is_some()) {
            world.finish().await;
            return None;
        }
        Some(Self { world, image, tiers })
    }

    /// Runs cases in every tier.
    pub async fn run(mut self, cases: &[Case]) -> Vec<Vec<(Tier, Verdict)>> {
        self.put_inputs();
        let mut todo: Vec<(usize, Tier)> = Vec::new();
        for (number, case) in cases.iter().enumerate() {
            let runs = self.tiers.iter().filter(|(tier, why)| why.is_none() && case.skipped(*tier).is_none());
            todo.extend(runs.map(|(tier, _)| (number, *tier)));
        }
        let seen = self.run_all(cases, todo).await;
        let rows = cases.iter().enumerate().map(|(number, case)| {
            let found = |tier: Tier| seen.iter().find(|(at, of, _)| (*at, *of) == (number, tier)).map(|(.., seen)| seen);
            self.judge(case, found)
        });
        let rows = rows.collect();
        self.world.finish().await;
        rows
    }

    fn judge<'a>(&self, case: &Case, found: impl Fn(Tier) -> Option<&'a Result<Seen, String>>) -> Vec<(Tier, Verdict)> {
        let mut row: Vec<(Tier, Verdict)> = Vec::new();
        let mut first: Option<(Tier, String)> = None;
        for (tier, why) in &self.tiers {
            let verdict = match (why, case.skipped(*tier), found(*tier)) {
                (Some(why), ..) => Verdict::Skipped(why.clone()),
                (None, Some(why), _) => Verdict::Skipped(why.to_owned()),
                (None, None, None) => Verdict::Failed("it was not run".to_owned()),
                (None, None, Some(Err(why))) => Verdict::Failed(why.clone()),
                (None, None, Some(Ok(seen))) => {
                    let same = first.as_ref().is_none_or(|(_, other)| *other == seen.common(case));
                    let expected = case.holds(seen);
                    match (expected, same, case.differing(*tier)) {
                        (Ok(()), true, None) => {
                            first.get_or_insert_with(|| (*tier, seen.common(case)));
                            Verdict::Same
                        }
                        (Ok(()), true, Some(_)) => Verdict::Failed(format!("a difference is listed and not there: {}", seen.shown())),
                        (_, _, Some(why)) => Verdict::Differs(why),
                        (Err(why), ..) => Verdict::Failed(format!("{why}: {}", seen.shown())),
                        (Ok(()), false, None) => {
                            let (other, what) = first.as_ref().map_or(("", ""), |(tier, what)| (tier.name(), what));
                            Verdict::Failed(format!("not as in {other}, where it is {what}: {}", seen.shown()))
                        }
                    }
                }
            };
            row.push((*tier, verdict));
        }
        row
    }

    /// What cases have as inputs.
    fn put_inputs(&self) {
        let tenant = TenantId::new("public").unwrap();
        let all: Vec<u8> = (0..=255).collect();
        for (name, bytes) in
            [("text", &b"data!\n"[..]), ("script", b"#!/bin/sh\necho ran \"$@\"\n"), ("orphan", b"#!/no/such/shell\n"), ("bytes", &all)]
        {
            self.world.objects.put_now(&keys::upload(&tenant, name), bytes);
        }
    }

    async fn run_all(&mut self, cases: &[Case], mut todo: Vec<(usize, Tier)>) -> Vec<(usize, Tier, Result<Seen, String>)> {
        todo.reverse();
        let mut under_way: Vec<UnderWay> = Vec::new();
        let mut done = Vec::new();
        while !todo.is_empty() || !under_way.is_empty() {
            while under_way.len() < AT_ONCE
                && let Some((number, tier)) = todo.pop()
            {
                match self.begin(number, tier, &cases[number]).await {
                    Ok(begun) => under_way.push(begun),
                    Err(why) => done.push((number, tier, Err(why))),
                }
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
            assert!(!self.world.running.is_finished(), "the worker ended");
            let mut still = Vec::new();
            for mut one in under_way {
                let case = &cases[one.number];
                self.stop_if_due(&mut one, case).await;
                let mut ends: Vec<AttemptEnd> = self.world.ends().into_iter().filter(|end| end.name.job == one.job).collect();
                if ends.len() == case.count as usize {
                    ends.sort_by_key(|end| end.name.index);
                    done.push((one.number, one.tier, Ok(self.see(ends))));
                } else if one.begun.elapsed() > END_WAIT {
                    done.push((one.number, one.tier, Err(format!("no end within {END_WAIT:?}"))));
                } else {
                    still.push(one);
                }
            }
            under_way = still;
        }
        done
    }

    async fn begin(&mut self, number: usize, tier: Tier, case: &Case) -> Result<UnderWay, String> {
        let mut task = json!({ "isolation": tier.name(), "resources": { "memory": MEMORY }, "timeouts": { "start": "80s" } });
        for (name, value) in case.task.as_object().unwrap() {
            match (&mut task[name], value) {
                (Value::Object(fields), Value::Object(more)) => fields.extend(more.clone()),
                (place, value) => *place = value.clone(),
            }
        }
        if tier != Tier::Process {
            task["image"] = json!(if case.user { image::OF_USER } else { &self.image });
        }
        let items = if case.count == 1 { json!({ "inline": [{ "a": "item value" }] }) } else { json!({ "count": case.count }) };
        let spec = json!({ "version": "volley/v1", "name": "t", "items": items, "task": task });
        parse_and_validate(spec.to_string().as_bytes(), &Features::current()).map_err(|e| e.to_string())?;
        let (job, _) = self.world.job(&items.to_string(), &task.to_string());
        let (bundle, order) = self.world.bundle(job, 0, case.count);
        self.world.order(vec![order]).await;
        Ok(UnderWay { number, tier, job, bundle, begun: Instant::now(), stopped: false })
    }

    async fn stop_if_due(&mut self, one: &mut UnderWay, case: &Case) {
        let Some(after) = case.stop_after.filter(|_| !one.stopped) else { return };
        let runs = |at: &volley_jobspecs::wire::work::At| {
            at.name.job == one.job && at.stage == AtStage::Running && u128::from(at.for_ms) >= after.as_millis()
        };
        if self.world.last_beat().at.iter().any(runs) {
            one.stopped = true;
            self.world.order(vec![Order::Stop { bundle: one.bundle, tasks: vec![Run { first: 0, count: 1 }] }]).await;
        }
    }

    fn see(&self, ends: Vec<AttemptEnd>) -> Seen {
        let read = |key: &str| self.world.objects.read(key);
        let files = ends.iter().map(|end| {
            let list = read(&keys::attempt_manifest(&end.name)).map_or(Value::Null, |bytes| serde_json::from_slice(&bytes).unwrap());
            let paths = list.as_array().into_iter().flatten().map(|entry| entry["path"].as_str().unwrap().to_owned());
            paths.map(|path| (path.clone(), read(&keys::attempt_output(&end.name, &path)).unwrap_or_default())).collect()
        });
        let stdout = ends.iter().map(|end| match &end.stdout {
            Some(stream) if stream.stored => read(&keys::attempt_log(&end.name, "stdout")).unwrap_or_default(),
            Some(stream) => stream.tail.to_vec(),
            None => Vec::new(),
        });
        Seen { files: files.collect(), stdout: stdout.collect(), ends }
    }
}

struct UnderWay {
    number: usize,
    tier: Tier,
    job: JobId,
    bundle: BundleId,
    begun: Instant,
    stopped: bool,
}

/// What this host lacks for machines.
fn no_machines() -> Result<(), String> {
    Host::find()?;
    host::part("VOLLEY_GUEST_MODULES", "modules").filter(|dir| dir.is_dir()).ok_or("no guest modules (VOLLEY_GUEST_MODULES)")?;
    initramfs::find_agent().map_err(|e| e.to_string())?;
    if PathBuf::from("/sbin/mke2fs").is_file() { Ok(()) } else { Err("no /sbin/mke2fs".to_owned()) }
}
