//! Server-sent events.
//!
//! Owns putting lines together to events. Does not own what the data means (`watch`).

/// Puts lines together to events.
#[derive(Debug, Default)]
pub(crate) struct EventReader {
    data: Vec<u8>,
    has_data: bool,
    /// Is it a `task` event?
    task: bool,
    /// Leave `task` events out.
    without_tasks: bool,
}

impl EventReader {
    /// A reader that leaves `task` events out before they are read: a job may have thousands a second.
    pub(crate) fn new(without_tasks: bool) -> Self {
        Self { without_tasks, ..Self::default() }
    }

    /// Takes the next line; gives the data of an event when the line ends one. The data carries the id and the name too.
    pub(crate) fn line(&mut self, line: &[u8]) -> Option<Vec<u8>> {
        if line.is_empty() {
            let whole = std::mem::take(&mut self.has_data);
            let data = std::mem::take(&mut self.data);
            let unwanted = std::mem::take(&mut self.task) && self.without_tasks;
            return (whole && !unwanted).then_some(data);
        }
        if let Some(name) = line.strip_prefix(b"event:") {
            self.task = name.trim_ascii() == b"task";
        }
        if let Some(data) = line.strip_prefix(b"data:") {
            if self.has_data {
                self.data.push(b'\n');
            }
            self.has_data = true;
            self.data.extend_from_slice(data.strip_prefix(b" ").unwrap_or(data));
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_and_ids_are_no_events_and_several_data_lines_are_one() {
        let mut reader = EventReader::default();
        let lines = [": keep-alive", "", "id: 7", "event: job", "data: {\"a\":", "data:1}", "", "data: x"];
        let events: Vec<Vec<u8>> = lines.iter().filter_map(|line| reader.line(line.as_bytes())).collect();
        assert_eq!(events, [b"{\"a\":\n1}".to_vec()]);
    }
    #[test]
    fn task_events_are_left_out_when_nobody_wants_them() {
        let lines = ["event: task", "data: 1", "", "event: job", "data: 2", ""];
        let read = |mut reader: EventReader| lines.iter().filter_map(|line| reader.line(line.as_bytes())).count();
        assert_eq!((read(EventReader::new(false)), read(EventReader::new(true))), (2, 1));
    }
}
