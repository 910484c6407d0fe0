//! Whom tasks run as where everything is started by root.

use std::os::unix::fs::PermissionsExt as _;

use serde_json::{Value, json};

use crate::support::Cluster;

/// Both tasks open their directories to everybody, meet, try to end and to read each other, and say what worked.
const MEET: &str = r#"
me=$VOLLEY_TASK_INDEX; other=$((1 - me))
echo secret > mine; chmod 777 . mine $VOLLEY_OUTPUT_DIR
pwd > $MEET/$me.new; echo $$ >> $MEET/$me.new; mv $MEET/$me.new $MEET/$me
tries=0; while [ ! -e $MEET/$other ]; do tries=$((tries + 1)); [ $tries -lt 400 ] || exit 9; sleep 0.05; done
{ read dir; read pid; } < $MEET/$other
kill -0 $pid 2>/dev/null && echo signalled
kill -TERM $pid 2>/dev/null && echo ended
cat $dir/mine 2>/dev/null && echo read
ls $dir $dir/../out 2>/dev/null && echo listed
touch $MEET/$me.tried
tries=0; while [ ! -e $MEET/$other.tried ]; do tries=$((tries + 1)); [ $tries -lt 400 ] || exit 9; sleep 0.05; done
id -u; id -g; [ "$HOME" = "$(pwd)" ] && echo home; echo $USER $LOGNAME
if command -v python3 > /dev/null
then python3 -c 'import getpass, os; print(getpass.getuser(), os.path.expanduser("~") == os.environ["HOME"] == os.getcwd())'
else echo task True
fi
"#;

fn root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        eprintln!("skipped: not root");
    }
    root
}

fn said(cluster: &Cluster, count: u64, task: Value) -> Vec<String> {
    let job = cluster.submit(&cluster.spec(json!({ "count": count }), task, json!({})));
    let ended = cluster.ended(&job);
    assert_eq!(ended["tasks"]["succeeded"], count, "{ended} {:?}", cluster.results(&job));
    cluster.results(&job).iter().map(|row| row["stdoutTail"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn tasks_of_two_slots_cannot_touch_each_other() {
    if !root() {
        return;
    }
    let Some(cluster) = Cluster::up_with(&["--slots", "2"]) else { return };
    let meet = cluster.path("meet");
    std::fs::create_dir(&meet).unwrap();
    std::fs::set_permissions(&meet, std::fs::Permissions::from_mode(0o1777)).unwrap();
    let mut said = said(&cluster, 2, json!({ "command": MEET, "env": { "MEET": meet.to_str().unwrap() } }));
    said.sort();
    assert_eq!(said, [80_000, 80_001].map(|id| format!("{id}\n{id}\nhome\ntask task\ntask True\n")));
}

#[test]
fn one_user_and_root_are_had_by_asking_for_them() {
    if !root() {
        return;
    }
    for (user, id) in [("root", "0\n0\n"), ("65534:65534", "65534\n65534\n")] {
        let Some(cluster) = Cluster::up_with(&["--slots", "2", "--task-user", user]) else { return };
        assert_eq!(said(&cluster, 1, json!({ "command": "id -u; id -g" })), [id]);
    }
}
