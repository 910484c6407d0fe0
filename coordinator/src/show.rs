//! Records as JSON, for people.
//!
//! Owns which records a job is mentioned in, and the form of a line. Does not own reading the log (`io/log.rs`) or the words in a
//! record (`wire/record.rs`).

use serde_json::{Value, json};
use volley_jobspecs::ids::JobId;
use volley_jobspecs::wire;
use volley_jobspecs::wire::record::{Decision, Record};

/// Makes one line of a record: `{"sequence": …, "record": …}`, or why it can't be read and its bytes in hex. With `job`, records that
/// don't mention it give nothing.
#[must_use]
pub fn line(sequence: u64, bytes: &[u8], job: Option<JobId>) -> Option<Value> {
    let record: Record = match wire::decode("record", bytes) {
        Ok(record) => record,
        Err(_) if job.is_some() => return None,
        Err(error) => return Some(json!({ "sequence": sequence, "unreadable": error.to_string(), "bytes": hex::encode(bytes) })),
    };
    if job.is_some_and(|job| !mentions(sequence, &record, job)) {
        return None;
    }
    match serde_json::to_value(&record) {
        Ok(record) => Some(json!({ "sequence": sequence, "record": record })),
        Err(error) => Some(json!({ "sequence": sequence, "unreadable": error.to_string(), "bytes": hex::encode(bytes) })),
    }
}

fn mentions(sequence: u64, record: &Record, job: JobId) -> bool {
    match record {
        Record::Submit(_) => sequence == job.0,
        Record::Control(control) => crate::apply::job_of(&control.verb) == Some(job),
        Record::Lead(_) => false,
        Record::Report(report) => report.ends.iter().any(|end| end.name.job == job),
        Record::Decided(decided) => decided.decisions.iter().any(|decision| match decision {
            Decision::Assign(all) => all.iter().any(|assignment| assignment.job == job),
            Decision::AttemptsLost(names) => names.iter().any(|name| name.job == job),
            Decision::Done { job: done, .. } => *done == job,
            Decision::UploadFound { jobs, .. } => jobs.contains(&job),
            Decision::VolumePinned { job: pinned, .. } => *pinned == job,
            Decision::Tick(_)
            | Decision::WorkerJoined { .. }
            | Decision::WorkerLost { .. }
            | Decision::Level(_)
            | Decision::Digest { .. }
            | Decision::Quarantine { .. }
            | Decision::Checkpointed { .. }
            | Decision::VolumePromoted { .. }
            | Decision::VolumeGone { .. }
            | Decision::VolumesStored { .. }
            | Decision::VolumeGrown { .. }
            | Decision::UploadGone { .. } => false,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use volley_jobspecs::ids::{AttemptName, Incarnation, Term, WorkerId};
    use volley_jobspecs::wire::plan::Isolation;
    use volley_jobspecs::wire::record::Decided;
    use volley_jobspecs::wire::report::{AttemptEnd, Ending, Report, Stream};

    fn decided(decisions: Vec<Decision>) -> Vec<u8> {
        wire::encode(&Record::Decided(Decided { term: Term(3), round: 9, decisions }))
    }

    #[test]
    fn a_record_reads_like_what_it_is() {
        let bytes =
            decided(vec![Decision::Tick(5), Decision::Digest { sequence: 7, hash: [0xab; 16] }, Decision::Checkpointed { sequence: 7 }]);
        let line = line(8, &bytes, None).unwrap();
        let wanted = json!({ "sequence": 8, "record": { "Decided": { "term": 3, "round": 9, "decisions": [
            { "Tick": 5 }, { "Digest": { "sequence": 7, "hash": "ab".repeat(16) } }, { "Checkpointed": { "sequence": 7 } } ] } } });
        assert_eq!(line, wanted);
    }

    #[test]
    fn reports_show_text_and_are_found_by_their_job() {
        let name = AttemptName { job: JobId(4), stage: 0, index: 1, number: 1, sequence: 6 };
        let stdout = Stream { bytes: 3, tail: b"hi\xff".to_vec().into(), stored: false, truncated: false };
        let end = AttemptEnd { code: Some(0), stdout: Some(stdout), ..AttemptEnd::bare(name, Ending::Succeeded, Isolation::Process) };
        let report = Report { worker: WorkerId::new("w").unwrap(), incarnation: Incarnation(1), number: 1, ends: vec![end] };
        let bytes = wire::encode(&Record::Report(report));
        assert!(line(9, &bytes, Some(JobId(5))).is_none());
        let line = line(9, &bytes, Some(JobId(4))).unwrap();
        assert_eq!(line["record"]["Report"]["ends"][0]["stdout"]["tail"], "hi\u{fffd}");
        assert_eq!(line["record"]["Report"]["ends"][0]["name"]["job"], "j4");
    }

    #[test]
    fn what_cannot_be_read_is_shown_as_it_is() {
        let line = line(2, &[0xff, 0x00], None).unwrap();
        assert_eq!((&line["sequence"], &line["bytes"]), (&json!(2), &json!("ff00")));
        assert!(super::line(2, &[0xff], Some(JobId(1))).is_none());
    }
}
