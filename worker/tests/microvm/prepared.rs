//! A task for a machine, as the stages before `restore` hand it over.

use volley_jobspecs::ids::{AttemptName, JobId, TenantId};
use volley_jobspecs::resolve::ResolvedTask;
use volley_jobspecs::spec::{Isolation, Resources, Timeouts};
use volley_worker::cgroup::Limits;
use volley_worker::dirs::Dirs;
use volley_worker::prepare::{InMachine, Prepared};
use volley_worker::spawner::proto::Spawn;

/// `/bin/true` in an image, without inputs.
pub fn prepared(image: &str, resources: Resources, dirs: &Dirs) -> Prepared {
    let task = ResolvedTask {
        image: Some(image.to_owned()),
        isolation: Isolation::Microvm,
        command: vec!["/bin/true".to_owned()],
        warm_up: Vec::new(),
        keep_processes: false,
        keep_failed_ms: None,
        env: Default::default(),
        stdin: None,
        workdir: None,
        resources,
        inputs: Vec::new(),
        outputs: Vec::new(),
        volumes: Vec::new(),
        timeouts: Timeouts::default(),
        network: None,
        secrets: Vec::new(),
    };
    let nothing = || Vec::new().into();
    let spawn = Spawn {
        argv: Vec::new(),
        env: Vec::new(),
        path: Vec::new(),
        cwd: nothing(),
        uid: None,
        gid: None,
        container: None,
        mounts: Vec::new(),
        top: None,
    };
    let inside = InMachine {
        name: AttemptName { job: JobId(1), stage: 0, index: 0, number: 1, sequence: 1 },
        tenant: TenantId::new("public").unwrap(),
        hostname: "measured".to_owned(),
        defaults: Default::default(),
        own: Default::default(),
        cwd: "/".to_owned(),
        dirs: dirs.clone(),
        has_files: false,
    };
    Prepared { task, spawn, limits: Limits::default(), grace_ms: 1_000, volumes: Vec::new(), inside: Some(Box::new(inside)) }
}
