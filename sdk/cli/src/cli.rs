//! The verbs and where each goes.
//!
//! Owns the list of verbs and the way from arguments to an exit code. Does not own any verb (`verbs`).

use std::ffi::OsString;
use std::io::Write as _;

use clap::{CommandFactory as _, FromArgMatches as _, Parser, Subcommand};

use crate::ctx::{Ctx, Global};
use crate::error::{CliError, failure};
use crate::exit::Exit;
use crate::help;
use crate::out::{Format, Out};
use crate::serve::{CoordinatorArgs, ImageArgs, LogArgs, StoredArgs, TemplateArgs, TemplateVerb, UpArgs, WorkerArgs};
use crate::verbs;

/// Fans one JSON job spec out to thousands of tasks on your own hosts.
///
/// `volley up` starts a whole cluster here. `volley run spec.json` submits a job, follows it and says what came of it.
#[derive(Debug, Parser)]
#[command(name = "volley", version, propagate_version = true, max_term_width = 110)]
pub struct Cli {
    #[command(flatten)]
    global: Global,
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Starts a whole cluster on this host: NATS, S3, coordinator, worker.
    Up(UpArgs),
    /// Runs a coordinator.
    Coordinator(CoordinatorArgs),
    /// Runs a worker.
    Worker(WorkerArgs),
    /// Reads or repairs the log (operators).
    Log(LogArgs),
    /// Imports, lists and removes the images of this host.
    Image(ImageArgs),
    /// Builds machine templates, and lists and removes those in the bucket.
    Template(TemplateArgs),

    /// Submits a job, follows it to its end and says what came of it.
    Run(verbs::run::Args),
    /// Submits a job and prints its id.
    Submit(verbs::submit::Args),
    /// Shows what a spec would run, without a cluster.
    Plan(verbs::plan::Args),
    /// Uploads a file for specs to name.
    Upload(verbs::upload::Args),

    /// Lists jobs, newest first.
    Jobs(verbs::jobs::Args),
    /// Shows a job.
    Job(verbs::job::Args),
    /// Lists the tasks of a job.
    Tasks(verbs::tasks::Args),
    /// Shows a task with all its attempts.
    Task(verbs::task::Args),
    /// Says why a task or a job does not run, or why it failed.
    Explain(verbs::explain::Args),
    /// Shows what tasks wrote.
    Logs(verbs::logs::Args),
    /// Shows how tasks ended.
    Results(verbs::results::Args),
    /// Lists or fetches output files.
    Outputs(verbs::outputs::Args),
    /// Opens a shell in a task's machine, or runs a command there.
    Exec(verbs::exec::Args),

    /// Waits until jobs have ended; exits as the worst of them.
    Wait(verbs::wait::Args),
    /// Cancels jobs.
    Cancel(verbs::cancel::Args),
    /// Starts nothing more of jobs until they are resumed.
    Pause(verbs::pause::Args),
    /// Goes on with paused jobs.
    Resume(verbs::resume::Args),
    /// Runs what did not succeed once more.
    Rerun(verbs::rerun::Args),
    /// Removes ended jobs with their results, logs and outputs.
    Rm(verbs::rm::Args),

    /// Makes, lists, copies and removes volumes and their snapshots.
    Volume(verbs::volume::Args),
    /// Lists workers, takes them out of use and back.
    Workers(verbs::workers::Args),
    /// Shows the cluster.
    Cluster(verbs::cluster::Args),
    /// Makes, changes, lists and removes tenants (operators).
    Tenant(verbs::tenant::Args),
    /// Makes, lists and revokes tokens (operators).
    Token(verbs::token::Args),

    /// Prints the JSON Schema of job specs.
    Schema(verbs::schema::Args),
    /// Prints a completion script for a shell.
    Completions(verbs::completions::Args),
}

/// A verb that the composition root carries out.
#[derive(Debug)]
pub enum ServeCommand {
    /// `volley up`.
    Up(UpArgs),
    /// `volley coordinator`.
    Coordinator(CoordinatorArgs),
    /// `volley worker`.
    Worker(WorkerArgs),
    /// `volley log`.
    Log(LogArgs),
    /// `volley image`.
    Image(ImageArgs),
    /// `volley template ls|show|rm|sweep`.
    Template(StoredArgs),
}

/// What is left to do.
#[derive(Debug)]
pub enum Outcome {
    /// Nothing: exit with this.
    Done(Exit),
    /// The composition root's part.
    Serve {
        /// What to start.
        command: ServeCommand,
        /// Where to write.
        out: Out,
    },
}

/// The command, for documentation.
#[must_use]
pub fn command() -> clap::Command {
    help::shaped(Cli::command())
}

/// Reads arguments, the program's name first. Help, version and wrong arguments are printed here.
///
/// # Errors
/// What to exit with: 0 after help, 2 after wrong arguments.
pub fn parse<T: Into<OsString> + Clone>(args: impl IntoIterator<Item = T>) -> Result<Cli, Exit> {
    let args: Vec<OsString> = args.into_iter().map(Into::into).collect();
    read(&args).map_err(|error| {
        // A standard output or error that is gone is nobody's loss.
        if !error.use_stderr() {
            let _ = error.print();
            return Exit::Success;
        }
        if wants_json(&args) {
            let text = error.to_string();
            let out = Out { format: Format::Json, quiet: false };
            let message = text.trim_start_matches("error: ").trim_end();
            let _ = std::io::stderr().write_all(failure(out, Exit::BadSpec, message).as_bytes());
        } else {
            let _ = error.print();
        }
        Exit::BadSpec
    })
}

/// Do arguments that can't be read ask for JSON all the same?
fn wants_json(args: &[OsString]) -> bool {
    let word = |arg: &OsString| arg.to_str().map(str::to_owned).unwrap_or_default();
    let words: Vec<String> = args.iter().map(word).collect();
    let joined = words.iter().any(|word| matches!(word.as_str(), "-ojson" | "-o=json" | "--output=json"));
    joined || words.windows(2).any(|pair| matches!(pair, [flag, format] if matches!(flag.as_str(), "-o" | "--output") && format == "json"))
}

pub(crate) fn read<T: Into<OsString> + Clone>(args: impl IntoIterator<Item = T>) -> Result<Cli, clap::Error> {
    let mut command = command();
    let mut matches = command.try_get_matches_from_mut(args)?;
    Cli::from_arg_matches_mut(&mut matches).map_err(|error| error.format(&mut command))
}

/// Carries a verb out, but for those that start processes.
pub async fn execute(cli: Cli) -> Outcome {
    let mut ctx = Ctx::new(cli.global);
    let out = ctx.out;
    let serve = |command| Outcome::Serve { command, out };
    match cli.verb {
        Verb::Run(_) => ctx.begin_trace("volley run"),
        Verb::Submit(_) => ctx.begin_trace("volley submit"),
        _ => {}
    }
    let result = match cli.verb {
        Verb::Up(args) => return serve(ServeCommand::Up(args)),
        Verb::Coordinator(args) => return serve(ServeCommand::Coordinator(args)),
        Verb::Worker(args) => return serve(ServeCommand::Worker(args)),
        Verb::Log(args) => return serve(ServeCommand::Log(args)),
        Verb::Image(args) => return serve(ServeCommand::Image(args)),
        Verb::Template(args) => match args.verb.clone() {
            TemplateVerb::Build(args) => verbs::template::build(&ctx, args).await,
            TemplateVerb::Stored(verb) => match args.stored(verb, ctx.tenant()) {
                Ok(args) => return serve(ServeCommand::Template(args)),
                Err(error) => Err(error),
            },
        },
        Verb::Run(args) => verbs::run::run(&ctx, args).await,
        Verb::Submit(args) => verbs::submit::run(&ctx, args).await,
        Verb::Plan(args) => verbs::plan::run(&ctx, args).await,
        Verb::Upload(args) => verbs::upload::run(&ctx, args).await,
        Verb::Jobs(args) => verbs::jobs::run(&ctx, args).await,
        Verb::Job(args) => verbs::job::run(&ctx, args).await,
        Verb::Tasks(args) => verbs::tasks::run(&ctx, args).await,
        Verb::Task(args) => verbs::task::run(&ctx, args).await,
        Verb::Explain(args) => verbs::explain::run(&ctx, args).await,
        Verb::Logs(args) => verbs::logs::run(&ctx, args).await,
        Verb::Results(args) => verbs::results::run(&ctx, args).await,
        Verb::Exec(args) => verbs::exec::run(&ctx, args).await,
        Verb::Outputs(args) => verbs::outputs::run(&ctx, args).await,
        Verb::Wait(args) => verbs::wait::run(&ctx, args).await,
        Verb::Cancel(args) => verbs::cancel::run(&ctx, args).await,
        Verb::Pause(args) => verbs::pause::run(&ctx, args).await,
        Verb::Resume(args) => verbs::resume::run(&ctx, args).await,
        Verb::Rerun(args) => verbs::rerun::run(&ctx, args).await,
        Verb::Rm(args) => verbs::rm::run(&ctx, args).await,
        Verb::Workers(args) => verbs::workers::run(&ctx, args).await,
        Verb::Cluster(args) => verbs::cluster::run(&ctx, args).await,
        Verb::Volume(args) => verbs::volume::run(&ctx, args).await,
        Verb::Tenant(args) => verbs::tenant::run(&ctx, args).await,
        Verb::Token(args) => verbs::token::run(&ctx, args).await,
        Verb::Schema(args) => verbs::schema::run(&ctx, args),
        Verb::Completions(args) => verbs::completions::run(&ctx, args),
    };
    let why = result.as_ref().err().map(ToString::to_string);
    let exit = result.unwrap_or_else(|error| report(out, &error));
    if let Some(trace) = &ctx.trace {
        trace.end(exit, why).await;
    }
    Outcome::Done(exit)
}

/// Reads arguments and carries the verb out.
pub async fn run<T: Into<OsString> + Clone>(args: impl IntoIterator<Item = T>) -> Outcome {
    match parse(args) {
        Ok(cli) => execute(cli).await,
        Err(exit) => Outcome::Done(exit),
    }
}

fn report(out: Out, error: &CliError) -> Exit {
    // A standard error that is gone is nobody's loss.
    let _ = std::io::stderr().write_all(error.render(out.format).as_bytes());
    error.exit()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Result<Cli, clap::Error> {
        read(line.split(' '))
    }

    #[test]
    fn clap_finds_no_fault_with_the_verbs() {
        command().debug_assert();
    }

    #[test]
    fn who_asks_for_json_is_told_of_wrong_arguments_in_json() {
        let args = |line: &str| line.split(' ').map(OsString::from).collect::<Vec<_>>();
        for line in ["volley -o json jobs --no-such-flag", "volley jobs --output=json --x", "volley jobs -ojson --x"] {
            assert!(wants_json(&args(line)), "{line}");
        }
        assert!(!wants_json(&args("volley jobs -o table json")));
        let told = failure(Out { format: Format::Json, quiet: false }, Exit::BadSpec, "unexpected argument");
        assert_eq!(told, "{\"code\":\"usage\",\"message\":\"unexpected argument\",\"retryable\":false}\n");
    }

    #[test]
    fn global_flags_stand_anywhere() {
        for line in ["volley -o json jobs", "volley jobs -o json"] {
            let cli = parsed(line).unwrap_or_else(|e| panic!("{e}"));
            assert!(Ctx::new(cli.global).out.json(), "{line}");
        }
    }

    #[test]
    fn every_verb_of_the_documentation_is_there() {
        let lines = [
            "volley up",
            "volley coordinator --nats nats://h:4222 --s3-bucket b --data-dir /d",
            "volley worker --nats nats://h:4222 --s3-bucket b --work-dir /w --label a=b --cpus 0.5 --memory 2GiB",
            "volley run - --items x.csv --upload a=b",
            "volley submit spec.json --key k",
            "volley plan spec.json",
            "volley jobs --state running --label a=b --all",
            "volley job j7 --spec",
            "volley tasks j7 --state failed",
            "volley task j7 3",
            "volley explain j7",
            "volley explain j7 3",
            "volley logs -f j7",
            "volley logs j7 3 --stream stderr --attempt 2",
            "volley results j7 --failed --follow --out f",
            "volley outputs ls j7 3",
            "volley outputs get j7",
            "volley outputs get j7 3 a.txt --stdout",
            "volley exec j7 3",
            "volley exec j7 3 --attempt 2 -- ls -la /",
            "volley exec j7 3 --attempt 2 --end",
            "volley run spec.json --keep-failed",
            "volley submit spec.json --keep-failed=2h",
            "volley wait j7 j8 --timeout 5m",
            "volley cancel j7 --now --reason because",
            "volley pause j7",
            "volley resume j7",
            "volley rerun j7",
            "volley rm j7",
            "volley rm j7 j8 --no-wait",
            "volley workers",
            "volley workers drain w1",
            "volley workers resume w1",
            "volley volume create v 10GiB --flush s3",
            "volley volume ls",
            "volley volume show v",
            "volley volume snapshot v@s",
            "volley volume clone v@s w",
            "volley volume rm v@s v",
            "volley tenant add t --weight 50",
            "volley tenant ls",
            "volley tenant rm t",
            "volley token ls",
            "volley token create --tenant t --operator",
            "volley token revoke id",
            "volley log show --from 7 --limit 3",
            "volley log skip 9",
            "volley template build spec.json",
            "volley template --s3-bucket b ls --template-keys k",
            "volley cluster",
            "volley schema",
            "volley completions bash",
            "volley upload x",
        ];
        for line in lines {
            assert!(parsed(line).is_ok(), "{line}: {:?}", parsed(line).err().map(|e| e.to_string()));
        }
    }

    #[test]
    fn a_wrong_job_id_is_told_at_once() {
        let error = parsed("volley job 7").err().map(|e| e.to_string()).unwrap_or_default();
        assert!(error.contains("one looks like j1042"), "{error}");
    }
}
