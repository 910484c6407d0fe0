//! Limits and kills on a host that has cgroup v2 alone, which this machine may not be: a guest is booted that is.
//!
//! Owns where in the hierarchy a worker starts, in each of the places that a real one starts in. This executable runs again in the
//! guest, as root, with one test a process; there a skipped test is a failed one.

use std::time::Duration;

use crate::guest::{Console, Guest, Host};

mod inside;

/// Boot and all tests take 25 seconds on an idle machine; the runner ends a test after 180.
const TIME_MAX: Duration = Duration::from_secs(150);
/// What each case is run by. `case_ TEST GROUP [COMMAND …]`: in a cgroup that is made for it.
const FUNCTIONS: &str = r#"
mount -t cgroup2 -o nsdelegate cgroup2 /sys/fs/cgroup
top=/sys/fs/cgroup
enter() { mkdir -p $top$1 && echo 0 > $top$1/cgroup.procs; }
case_() {
  test=$1 group=$2; shift 2
  echo "@begin $test"
  (enter $group; exec "$@" /bin/tests --exact $test --include-ignored --nocapture --test-threads 1) 2>&1
  echo "@end $test $?"
}
beside() { mkdir -p $top$1; sleep 600 & echo $! > $top$1/cgroup.procs; }
"#;

/// One test in the guest: its name, the cgroup it starts in, and what is done before, in shell.
struct Case {
    name: &'static str,
    group: &'static str,
    before: &'static str,
    /// The command the test is given to.
    by: &'static str,
}

const fn at_the_top(name: &'static str) -> Case {
    Case { name, group: "/", before: "", by: "" }
}

const CASES: [Case; 14] = [
    // First, while the top hands nothing down.
    Case { name: "cgroup_v2::inside::from_a_session_to_the_top", group: "/session", before: "beside /session", by: "" },
    at_the_top("cgroup_v2::inside::from_the_top"),
    // As on many hosts with systemd: no unit of the session's slice asked for CPU.
    Case {
        name: "cgroup_v2::inside::from_a_session_without_cpu_to_the_top",
        group: "/slice/session",
        before: "beside /slice/session; echo '+memory +pids' > $top/slice/cgroup.subtree_control",
        by: "",
    },
    Case { name: "cgroup_v2::inside::a_service_to_a_leaf", group: "/service", before: "", by: "" },
    Case {
        name: "cgroup_v2::inside::a_service_of_another_user_to_a_leaf",
        group: "/delegated",
        before: "mkdir $top/delegated; chown 65534 $top/delegated $top/delegated/cgroup.*",
        by: "start-stop-daemon -S -c 65534:65534 -n none -a /bin/env --",
    },
    Case { name: "cgroup_v2::inside::one_leaf_is_enough", group: "/twice", before: "", by: "" },
    at_the_top("cgroup_v2::inside::a_process_lost_to_memory_is_oom_also_with_exit_code_0"),
    at_the_top("cgroup_v2::inside::what_a_task_leaves_in_memory_is_not_charged_to_the_next"),
    at_the_top("cgroup_v2::inside::a_stray_in_a_group_of_its_own_dies_and_the_group_goes"),
    at_the_top("cgroup_v2::inside::what_ignores_term_and_what_forks_is_killed"),
    at_the_top("cgroup_v2::inside::a_predecessors_tasks_are_killed"),
    at_the_top("cgroup_v2::inside::what_is_moved_has_the_limits_and_dies_with_the_group"),
    at_the_top("limits_end_as_what_they_are"),
    at_the_top("nothing_of_a_killed_worker_runs_when_the_next_one_joins"),
];

/// What is wrong with a case, by what the guest said.
fn wrong(console: &Console, name: &str) -> Option<String> {
    let text = console.text.split_once(&format!("@begin {name}\n")).map(|(_, rest)| rest);
    let Some(text) = text else { return Some(format!("{name}: did not begin")) };
    let Some((text, code)) = text.split_once(&format!("@end {name} ")) else { return Some(format!("{name}: did not end:\n{text}")) };
    let passed = code.starts_with("0\n") && text.contains("test result: ok. 1 passed; 0 failed; 0 ignored;");
    (!passed || text.contains("skipped:")).then(|| format!("{name}: failed, was skipped, or was not found:\n{text}"))
}

#[test]
fn limits_and_kills_work_in_a_guest_with_cgroup_v2_alone() {
    let host = match Host::find() {
        Ok(host) => host,
        Err(why) => {
            eprintln!("skipped: {why}");
            return;
        }
    };
    let mut guest = Guest::new(host, "cgroup_no_v1=all");
    guest.program(&std::env::current_exe().unwrap(), "/bin/tests");
    let mut script = FUNCTIONS.to_owned();
    for Case { name, group, before, by } in CASES {
        script.push_str(&format!("{before}\ncase_ {name} {group} {by}\n"));
    }
    let console = guest.run(&script, TIME_MAX);
    println!("{}", console.text);
    let wrong: Vec<String> = CASES.iter().filter_map(|case| wrong(&console, case.name)).collect();
    assert!(wrong.is_empty(), "{} of {} in the guest:\n{}", wrong.len(), CASES.len(), wrong.join("\n"));
    assert!(console.off, "the guest did not end within {TIME_MAX:?}");
    println!("{} tests passed in the guest, in {:?}", CASES.len(), console.took);
}
