//! Tests of cutting files into pages: what is cut comes back item by item.

use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::spec::FileSource;

fn cut_in(format: FileFormat, chunk: Option<u32>, pieces: &[&[u8]]) -> Result<(Vec<Page>, ItemsIndex), CutError> {
    let mut cutter = PageCutter::new(&ItemFile { source: FileSource::default(), format, chunk });
    let mut pages = Vec::new();
    for piece in pieces {
        cutter.feed(piece, &mut pages)?;
    }
    let index = cutter.finish(&mut pages)?;
    Ok((pages, index))
}

fn items(format: FileFormat, chunk: Option<u32>, text: &str) -> Result<Vec<Value>, String> {
    let (pages, index) = cut_in(format, chunk, &[text.as_bytes()]).map_err(|e| e.to_string())?;
    let loaded: Vec<LoadedPage> =
        pages.iter().map(|p| LoadedPage::new(&p.entry, p.bytes.clone()).unwrap_or_else(|e| panic!("{e}"))).collect();
    let item = |i: u32| {
        let (page, _) = index.locate(i).unwrap_or_else(|| panic!("no page for {i}"));
        loaded[page as usize].item(i).unwrap_or_else(|e| panic!("{e}"))
    };
    Ok((0..index.count).map(item).collect())
}

fn csv_format() -> FileFormat {
    FileFormat::Csv { header: true, delimiter: b',', columns: vec![] }
}

#[test]
fn lines_and_json_lines_skip_the_empty_ones() {
    assert_eq!(items(FileFormat::Lines, None, "\u{feff}a\r\n\n b\"\nc"), Ok(vec![json!("a"), json!(" b\""), json!("c")]));
    assert_eq!(items(FileFormat::Jsonl, None, "{\"a\": 1}\n \n[2]\r\n3"), Ok(vec![json!({"a": 1}), json!([2]), json!(3)]));
    assert_eq!(items(FileFormat::Lines, Some(2), "a\nb\nc\n"), Ok(vec![json!(["a", "b"]), json!(["c"])]));
}

#[test]
fn csv_has_quotes_line_feeds_and_columns() {
    assert_eq!(
        items(csv_format(), None, "id,text\r\n1,\"a \"\"b\"\"\nc\"\n2,d\"e\n"),
        Ok(vec![json!({ "id": "1", "text": "a \"b\"\nc" }), json!({ "id": "2", "text": "d\"e" })])
    );
    let bare = FileFormat::Csv { header: false, delimiter: b';', columns: vec![] };
    assert_eq!(items(bare, None, "1;2\n3;4;5"), Ok(vec![json!(["1", "2"]), json!(["3", "4", "5"])]));
    let named = FileFormat::Csv { header: false, delimiter: b'\t', columns: vec!["a".into(), "b".into()] };
    assert_eq!(items(named, None, "1\t2\n"), Ok(vec![json!({ "a": "1", "b": "2" })]));
}

#[test]
fn errors_name_the_line() {
    let long = format!("a\n{}\n", "x".repeat(LINE_BYTES_MAX + 1));
    let large = format!("a\nb\n{}\n", "x".repeat(ITEM_BYTES_MAX));
    for (format, text, wanted) in [
        (FileFormat::Jsonl, "{}\n\n{\"a\":}\n", "line 3: not JSON, column 6: expected value"),
        (FileFormat::Jsonl, "{}\n{\"a\":1,\"a\":2}\n", "line 2: the field $.a is given twice"),
        (FileFormat::Lines, "\n\n", "line 2: the file has no items in it"),
        (FileFormat::Lines, "", "line 1: the file has no items in it"),
        (FileFormat::Lines, &long, "line 2: longer than 262144 bytes (is it one record per line?)"),
        (FileFormat::Lines, &large, "line 3: the item has 65538 bytes of JSON; at most 65536 fit in a task's environment"),
        (csv_format(), "a,b\n1,2\n3\n", "line 3: 1 fields, but there are 2 columns"),
        (csv_format(), "a,b\n\"1\n2\",3\n4\n", "line 4: 1 fields, but there are 2 columns"),
        (csv_format(), "a,b\r\n1,2\r\n\r\n3\r\n", "line 4: 1 fields, but there are 2 columns"),
        (csv_format(), "a,a\n", "line 1: the header has an empty name or the name \"a\" twice"),
        (csv_format(), "a,b\n1,\"2\n", "line 2: a quotation mark isn't closed"),
        (csv_format(), "a,b\n", "line 1: the file has no items in it"),
    ] {
        assert_eq!(items(format, None, text), Err(wanted.to_owned()), "{}", &text[..text.len().min(40)]);
    }
    assert_eq!(cut_in(FileFormat::Lines, None, &[b"ok\n", b"\xff\n"]), Err(CutError { line: 2, kind: CutErrorKind::NotUtf8 }));
}

#[test]
fn pages_are_full_and_within_their_limits() {
    let text: String = (0..2_500).map(|i| format!("{i}\n")).collect();
    let (pages, index) = cut_in(FileFormat::Jsonl, None, &[text.as_bytes()]).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(pages.iter().map(|p| p.entry.count).collect::<Vec<_>>(), [1000, 1000, 500]);
    assert_eq!(index.locate(2_499).map(|(n, e)| (n, e.first)), Some((2, 2000)));
    assert_eq!(index.locate(2_500), None);
    let wide: String = (0..100).map(|_| format!("{}\n", "y".repeat(10_000))).collect();
    let (pages, index) = cut_in(FileFormat::Lines, None, &[wide.as_bytes()]).unwrap_or_else(|e| panic!("{e}"));
    assert!(pages.iter().all(|p| p.bytes.len() <= PAGE_BYTES_MAX && p.entry.count >= 20));
    assert_eq!(ItemsIndex::from_json(&index.to_json()), Ok(index.clone()));
    let mut holed = index;
    holed.pages.remove(1);
    assert_eq!(ItemsIndex::from_json(&holed.to_json()), Err(PageError::Gap(1)));
}

#[test]
fn a_page_that_was_changed_is_refused() {
    let (pages, _) = cut_in(FileFormat::Lines, None, &[b"a\nb\n"]).unwrap_or_else(|e| panic!("{e}"));
    let mut bytes = pages[0].bytes.clone();
    bytes[1] ^= 1;
    assert_eq!(LoadedPage::new(&pages[0].entry, bytes).map(|_| ()), Err(PageError::Checksum { first: 0 }));
}

#[test]
fn large_numbers_keep_their_digits() {
    let (pages, _) = cut_in(FileFormat::Jsonl, None, &[b"{\"id\":123456789012345678901234567890}\n"]).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(pages[0].bytes, b"{\"id\":123456789012345678901234567890}\n");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]
    #[test]
    fn any_split_of_any_bytes_gives_the_same(
        text in "[a\"',\\n\\r0-9\u{feff}é]{0,60}", cuts in proptest::collection::vec(0usize..70, 0..6), kind in 0..3, chunk in proptest::option::of(1u32..4),
    ) {
        let format = || match kind { 0 => FileFormat::Jsonl, 1 => FileFormat::Lines, _ => csv_format() };
        let bytes = text.as_bytes();
        let mut cuts: Vec<usize> = cuts.into_iter().map(|c| c.min(bytes.len())).collect();
        cuts.extend([0, bytes.len()]);
        cuts.sort_unstable();
        let pieces: Vec<&[u8]> = cuts.windows(2).map(|w| &bytes[w[0]..w[1]]).collect();
        prop_assert_eq!(cut_in(format(), chunk, &pieces), cut_in(format(), chunk, &[bytes]));
    }

    #[test]
    fn csv_comes_back_as_it_was_written(rows in proptest::collection::vec(proptest::collection::vec("[a\",\\n x]{1,6}", 3), 1..20)) {
        let mut writer = ::csv::Writer::from_writer(Vec::new());
        writer.write_record(["a", "b", "c"]).map_err(|e| TestCaseError::fail(e.to_string()))?;
        for row in &rows {
            writer.write_record(row).map_err(|e| TestCaseError::fail(e.to_string()))?;
        }
        let text = String::from_utf8(writer.into_inner().unwrap_or_default()).unwrap_or_default();
        let wanted: Vec<Value> = rows.iter().map(|r| json!({ "a": r[0], "b": r[1], "c": r[2] })).collect();
        prop_assert_eq!(items(csv_format(), None, &text), Ok(wanted));
    }
}
