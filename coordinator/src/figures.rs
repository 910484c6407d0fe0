//! The coordinator's figures for an observer: the same that `/metrics` shows, from the same text, so that the two can't drift apart.
//!
//! Owns reading that text and telling it again and again. Does not own what is counted (`metrics`) or gauged (`api/cluster`).

use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use volley_jobspecs::observe::{Figure, FigureKind, Observer};

use crate::api::{App, cluster};

/// Tells an observer every figure, every so often, until `stop`.
pub async fn tell(app: Arc<App>, observer: Arc<dyn Observer>, every: Duration, stop: CancellationToken) {
    loop {
        match cluster::text(&app).await {
            Ok(text) => observer.figures(read(&text)),
            Err(error) => tracing::debug!(error = error.body.message, "figures can't be read now"),
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(every) => {}
        }
    }
}

/// Reads figures from Prometheus' text form. A histogram comes apart into its `_sum`, `_count` and `_bucket`.
#[must_use]
pub fn read(text: &str) -> Vec<Figure> {
    let (mut figures, mut help, mut kind) = (Vec::new(), String::new(), FigureKind::Gauge);
    for line in text.lines() {
        if let Some(comment) = line.strip_prefix("# ") {
            let mut words = comment.splitn(3, ' ');
            match (words.next(), words.next(), words.next()) {
                (Some("HELP"), Some(_), Some(text)) => help = text.trim_end_matches('.').to_owned(),
                (Some("TYPE"), Some(_), Some("gauge")) => kind = FigureKind::Gauge,
                (Some("TYPE"), Some(_), Some(_)) => kind = FigureKind::Counter,
                _ => {}
            }
            continue;
        }
        let Some((what, value)) = line.rsplit_once(' ') else { continue };
        let Ok(value) = value.parse() else { continue };
        let (name, labels) = match what.split_once('{') {
            Some((name, labels)) => (name, read_labels(labels.trim_end_matches('}'))),
            None => (what, Vec::new()),
        };
        let name = name.strip_suffix("_total").unwrap_or(name).to_owned();
        figures.push(Figure { name, help: help.clone(), kind, labels, value });
    }
    figures
}

/// Reads `a="b",c="d"`. Our labels hold words and names only, so nothing in them is escaped.
fn read_labels(text: &str) -> Vec<(String, String)> {
    let pair = |pair: &str| pair.split_once("=\"").map(|(name, value)| (name.trim_start_matches(',').to_owned(), value.to_owned()));
    text.split_inclusive('"').collect::<Vec<_>>().chunks(2).filter_map(|parts| pair(parts.concat().strip_suffix('"')?)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::Metrics;
    use prometheus_client::encoding::prometheus_text;
    use prometheus_client::registry::Registry;
    use volley_jobspecs::failure::FailureClass;

    #[test]
    fn figures_are_what_prometheus_would_scrape() {
        let metrics = Metrics::default();
        metrics.applied(3, Duration::from_micros(300), &[]);
        metrics.attempts.get_or_create(&crate::metrics::Outcome::of(Some(FailureClass::Oom))).inc_by(2);
        let mut registry = Registry::default();
        metrics.register(&mut registry);
        let mut text = String::new();
        prometheus_text::encode(&mut text, &registry).unwrap_or_else(|e| panic!("{e}"));
        let figures = read(&text);
        let find = |name: &str, labels: &[(&str, &str)]| {
            let labels: Vec<_> = labels.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
            figures.iter().find(|figure| figure.name == name && figure.labels == labels).map(|figure| (figure.kind, figure.value))
        };
        assert_eq!(find("volley_apply_records", &[]), Some((FigureKind::Counter, 3.0)), "{text}");
        assert_eq!(find("volley_track_attempts", &[("outcome", "oom")]), Some((FigureKind::Counter, 2.0)), "{text}");
        assert_eq!(find("volley_apply_batch_seconds_count", &[]), Some((FigureKind::Counter, 1.0)), "{text}");
        assert_eq!(find("volley_apply_batch_seconds_bucket", &[("le", "0.001")]), Some((FigureKind::Counter, 1.0)), "{text}");
        assert!(figures.iter().any(|figure| figure.help.starts_with("Attempts that ended")), "{figures:?}");
    }

    #[test]
    fn several_labels_are_told_apart() {
        let labels = read_labels(r#"state="running",pool="a,b""#);
        assert_eq!(labels, [("state".to_owned(), "running".to_owned()), ("pool".to_owned(), "a,b".to_owned())]);
        let gauge = read("# TYPE x gauge\nx{a=\"b\"} -2\n");
        assert_eq!(gauge.first().map(|figure| (figure.kind, figure.value)), Some((FigureKind::Gauge, -2.0)));
    }
}
