//! Tables for eyes.
//!
//! Owns their look: columns of text under capitals, nothing drawn, so that they can be cut with the usual tools. Does not own rows.

use comfy_table::{ContentArrangement, Table, presets};
pub use volley_jobspecs::units::{count, counted};

/// A table. Without rows: its header alone. Cells must be single lines without control characters (`clean::cell`).
#[must_use]
pub fn table(header: &[&str], rows: Vec<Vec<String>>) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(header.to_vec());
    table.add_rows(rows);
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    table.trim_fmt() + "\n"
}

/// Names with their values under each other; empty values are left out.
#[must_use]
pub fn fields(pairs: &[(&str, String)]) -> String {
    let shown: Vec<&(&str, String)> = pairs.iter().filter(|(_, value)| !value.is_empty()).collect();
    let width = shown.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    shown.iter().map(|(name, value)| format!("{name:width$}  {value}\n")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_stand_under_each_other() {
        let rows = vec![vec!["j7".into(), "a longer name".into()], vec!["j1042".into(), "b".into()]];
        assert_eq!(table(&["JOB", "NAME"], rows), "JOB    NAME\nj7     a longer name\nj1042  b\n");
    }

    #[test]
    fn fields_without_a_value_are_left_out() {
        assert_eq!(fields(&[("job", "j7".into()), ("reason", String::new()), ("priority", "0".into())]), "job       j7\npriority  0\n");
    }
}
