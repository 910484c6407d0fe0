//! The two programs beside a worker: this test binary, run again.

use std::ffi::OsString;

use volley_worker::volumes::programs::{self, Programs};

/// Both, as this binary.
pub fn ours() -> Programs {
    let arguments = ["--exact", "programs::as_a_program", "--ignored", "--nocapture", "--test-threads=1"];
    Programs { path: std::env::current_exe().unwrap(), arguments: arguments.map(OsString::from).to_vec() }
}

#[test]
#[ignore = "run by other tests"]
fn as_a_program() {
    let mut arguments = std::env::args_os().skip_while(|argument| !programs::is_ours(argument));
    let Some(verb) = arguments.next() else { return };
    let arguments: Vec<OsString> = arguments.collect();
    if verb == programs::FILE {
        let shown = programs::file(&arguments);
        if let Err(why) = &shown {
            eprintln!("volume file: {why}");
        }
        // Nobody reads what the harness would say.
        std::process::exit(shown.is_err().into());
    }
    let connection = programs::connection().unwrap();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let served = volley_volume::server::run(&connection, runtime.handle());
    if let Err(why) = &served {
        eprintln!("volume server: {why}");
    }
    // As the binary: what is under way ends with the process.
    std::process::exit(served.is_err().into());
}
