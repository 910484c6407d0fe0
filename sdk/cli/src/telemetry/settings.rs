//! What the standard `OTEL_…` variables say.
//!
//! Owns which of them count here and what they may say; nothing is sent unless an endpoint is named. Endpoints, headers, timeouts and
//! batches are read by the exporters themselves. Pure: the environment is an argument.

use std::time::Duration;

use super::TelemetryError;

/// How often metrics are sent when `OTEL_METRIC_EXPORT_INTERVAL` doesn't say: the standard's.
const INTERVAL_DEFAULT: Duration = Duration::from_secs(60);
/// How often figures are read at most: reading them costs a little.
const FIGURES_EVERY_MIN: Duration = Duration::from_millis(50);

/// Looks a variable up; one that is empty counts as unset.
pub type Var<'a> = &'a dyn Fn(&'static str) -> Option<String>;

/// What is sent, and how.
#[derive(Debug, Clone, PartialEq)]
pub struct Settings {
    /// Endpoint of spans; none: none are sent.
    pub traces: Option<String>,
    /// Endpoint of metrics; none: none are sent.
    pub metrics: Option<String>,
    /// Which traces are recorded.
    pub sampler: Sampler,
    /// How often metrics are sent.
    pub interval: Duration,
}

impl Settings {
    /// Reads them.
    ///
    /// # Errors
    /// [`TelemetryError::Value`] names the variable. What isn't on isn't looked at.
    pub fn read(var: Var) -> Result<Self, TelemetryError> {
        let disabled = var("OTEL_SDK_DISABLED").is_some_and(|value| value.eq_ignore_ascii_case("true"));
        let signal = |exporter, endpoint, protocol| {
            let named = [endpoint, "OTEL_EXPORTER_OTLP_ENDPOINT"].into_iter().find_map(|name| Some((name, var(name)?)));
            match named {
                Some((name, address)) if !disabled && is_on(var, exporter, protocol)? => is_address(name, address).map(Some),
                Some(_) | None => Ok(None),
            }
        };
        let traces = signal("OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")?;
        let metrics = signal("OTEL_METRICS_EXPORTER", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL")?;
        let sampler = if traces.is_some() { Sampler::read(var)? } else { Sampler::default() };
        let ms = var("OTEL_METRIC_EXPORT_INTERVAL").and_then(|text| text.parse().ok()).filter(|ms| *ms > 0);
        let interval = ms.map_or(INTERVAL_DEFAULT, Duration::from_millis);
        Ok(Self { traces, metrics, sampler, interval })
    }

    /// How often figures are read: twice as often as they are sent, so that none is older than half of that.
    #[must_use]
    pub fn figures_every(&self) -> Option<Duration> {
        self.metrics.as_ref().map(|_| (self.interval / 2).max(FIGURES_EVERY_MIN))
    }
}

fn is_on(var: Var, exporter: &'static str, protocol: &'static str) -> Result<bool, TelemetryError> {
    match var(exporter).as_deref() {
        Some("none") => return Ok(false),
        None | Some("otlp") => {}
        Some(other) => return Err(wrong(exporter, other, "otlp and none")),
    }
    for name in [protocol, "OTEL_EXPORTER_OTLP_PROTOCOL"] {
        match var(name).as_deref() {
            Some("http/protobuf") => return Ok(true),
            Some(other) => return Err(wrong(name, other, "http/protobuf, which collectors take at port 4318")),
            None => {}
        }
    }
    Ok(true)
}

fn is_address(variable: &'static str, text: String) -> Result<String, TelemetryError> {
    let host = text.strip_prefix("http://").or_else(|| text.strip_prefix("https://")).unwrap_or_default();
    if host.is_empty() || host.starts_with('/') {
        return Err(wrong(variable, &text, "addresses with http:// or https:// and a host, such as http://127.0.0.1:4318"));
    }
    Ok(text)
}

fn wrong(variable: &'static str, value: &str, allowed: &'static str) -> TelemetryError {
    TelemetryError::Value { variable, value: value.to_owned(), allowed }
}

/// Which traces are recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sampler {
    /// A trace is recorded if the low 63 bits of its id are below this.
    below: u64,
    /// Does what the caller decided stand?
    parent_based: bool,
}

/// One more than the largest number the low 63 bits of an id can be.
const IDS: u64 = 1 << 63;

impl Default for Sampler {
    fn default() -> Self {
        Self { below: IDS, parent_based: true }
    }
}

impl Sampler {
    fn read(var: Var) -> Result<Self, TelemetryError> {
        let Some(name) = var("OTEL_TRACES_SAMPLER") else { return Ok(Self::default()) };
        let (parent_based, own) = match name.strip_prefix("parentbased_") {
            Some(own) => (true, own),
            None => (false, name.as_str()),
        };
        let below = match own {
            "always_on" => IDS,
            "always_off" => 0,
            "traceidratio" => ratio(var)?,
            _ => {
                return Err(wrong(
                    "OTEL_TRACES_SAMPLER",
                    &name,
                    "always_on, always_off, traceidratio, and each with parentbased_ before it",
                ));
            }
        };
        Ok(Self { below, parent_based })
    }

    /// Is this trace recorded? `parent` is what the process before decided; none: the trace begins here.
    #[must_use]
    pub fn records(self, trace: [u8; 16], parent: Option<bool>) -> bool {
        match parent {
            Some(recorded) if self.parent_based => recorded,
            Some(_) | None => (u128::from_be_bytes(trace) as u64 & (IDS - 1)) < self.below,
        }
    }
}

fn ratio(var: Var) -> Result<u64, TelemetryError> {
    let name = "OTEL_TRACES_SAMPLER_ARG";
    let Some(text) = var(name) else { return Ok(IDS) };
    let ratio = text.parse().ok().filter(|ratio: &f64| (0.0..=1.0).contains(ratio));
    ratio.map(|ratio| (ratio * IDS as f64) as u64).ok_or_else(|| wrong(name, &text, "a number from 0 to 1"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(vars: &'static [(&'static str, &'static str)]) -> Result<Settings, String> {
        let var = |name| vars.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
        Settings::read(&var).map_err(|error| error.to_string())
    }

    const ON: (&str, &str) = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:4318");

    #[test]
    fn without_an_endpoint_everything_is_off_and_nothing_is_looked_at() {
        let off = read(&[("OTEL_TRACES_EXPORTER", "console"), ("OTEL_TRACES_SAMPLER", "x")]).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!((off.traces, off.metrics), (None, None));
    }

    #[test]
    fn each_signal_can_be_switched_on_and_off_alone() {
        let on = |vars| read(vars).map(|settings| (settings.traces.is_some(), settings.metrics.is_some(), settings.figures_every()));
        let minute = Some(Duration::from_secs(30));
        assert_eq!(on(&[ON]), Ok((true, true, minute)));
        assert_eq!(on(&[ON, ("OTEL_SDK_DISABLED", "TRUE")]), Ok((false, false, None)));
        assert_eq!(on(&[ON, ("OTEL_TRACES_EXPORTER", "none")]), Ok((false, true, minute)));
        assert_eq!(on(&[ON, ("OTEL_METRICS_EXPORTER", "none")]), Ok((true, false, None)));
        assert_eq!(on(&[("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://c/t")]), Ok((true, false, None)));
        let fast = on(&[("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "http://c/m"), ("OTEL_METRIC_EXPORT_INTERVAL", "1000")]);
        assert_eq!(fast, Ok((false, true, Some(Duration::from_millis(500)))));
    }

    #[test]
    fn what_can_not_be_done_is_refused_by_name() {
        let cases: [(&[(&str, &str)], &str); 6] = [
            (&[ON, ("OTEL_TRACES_EXPORTER", "zipkin")], "OTEL_TRACES_EXPORTER=\"zipkin\""),
            (&[ON, ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")], "OTEL_EXPORTER_OTLP_PROTOCOL=\"grpc\""),
            (&[("OTEL_EXPORTER_OTLP_ENDPOINT", "garbage")], "OTEL_EXPORTER_OTLP_ENDPOINT=\"garbage\""),
            (&[ON, ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "h:4318")], "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=\"h:4318\""),
            (&[ON, ("OTEL_TRACES_SAMPLER", "jaeger_remote")], "OTEL_TRACES_SAMPLER=\"jaeger_remote\""),
            (&[ON, ("OTEL_TRACES_SAMPLER", "traceidratio"), ("OTEL_TRACES_SAMPLER_ARG", "2")], "OTEL_TRACES_SAMPLER_ARG=\"2\""),
        ];
        for (vars, said) in cases {
            let error = read(vars).err().unwrap_or_default();
            assert!(error.starts_with(said), "{error}");
        }
    }

    #[test]
    fn samplers_decide_as_the_standard_says() {
        let sampler = |name: &'static str, arg: &'static str| {
            let var = move |variable: &'static str| match variable {
                "OTEL_TRACES_SAMPLER" => Some(name.to_owned()),
                _ => Some(arg.to_owned()),
            };
            Sampler::read(&var).unwrap_or_else(|e| panic!("{e}"))
        };
        let (low, high) = ([0; 16], [0xff; 16]);
        for (name, root, below_recorded, below_other) in [
            ("always_on", true, true, true),
            ("always_off", false, false, false),
            ("parentbased_always_on", true, true, false),
            ("parentbased_always_off", false, true, false),
        ] {
            let decided = [None, Some(true), Some(false)].map(|parent| sampler(name, "").records(high, parent));
            assert_eq!(decided, [root, below_recorded, below_other], "{name}");
        }
        let half = sampler("traceidratio", "0.5");
        assert!(half.records(low, None) && !half.records(high, None) && half.records(low, Some(false)));
        let half = sampler("parentbased_traceidratio", "0.5");
        assert!(half.records(high, Some(true)) && !half.records(low, Some(false)));
    }
}
