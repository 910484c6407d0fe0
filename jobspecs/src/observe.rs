//! What a process tells about itself to whoever watches it: spans that have ended, and figures.
//!
//! Owns their shapes and the port through which coordinator and worker hand them over, so that neither knows how they are sent. Does
//! not own sending (the composition root's), or which figures there are.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use crate::wire::trace::TraceContext;

/// What part a span has in a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SpanKind {
    /// None: it stays within one process.
    Internal,
    /// It answers a request.
    Server,
    /// It asks another process.
    Client,
}

/// A value of an attribute.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Value {
    /// Text.
    Text(String),
    /// A whole number.
    Number(i64),
}

impl From<String> for Value {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<u32> for Value {
    fn from(number: u32) -> Self {
        Self::Number(number.into())
    }
}

impl From<i32> for Value {
    fn from(number: i32) -> Self {
        Self::Number(number.into())
    }
}

/// A span that has ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Span {
    /// Its trace and its own id.
    pub context: TraceContext,
    /// Its parent's id; none: it is the root.
    pub parent: Option<[u8; 8]>,
    /// Is the parent another process's?
    pub remote: bool,
    /// Its part in a call.
    pub kind: SpanKind,
    /// Its name: one of few.
    pub name: &'static str,
    /// When it began, in microseconds since 1970.
    pub start_us: u64,
    /// When it ended, in microseconds since 1970.
    pub end_us: u64,
    /// What is known of it.
    pub attributes: Vec<(&'static str, Value)>,
    /// Why it failed, for people; none: it didn't.
    pub error: Option<String>,
}

/// How a figure moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FigureKind {
    /// It counts up from the process's start.
    Counter,
    /// It is what it is now.
    Gauge,
}

/// A figure at one moment.
#[derive(Debug, Clone, PartialEq)]
pub struct Figure {
    /// Its name, as Prometheus would have it but without `_total`.
    pub name: String,
    /// What it says, for people.
    pub help: String,
    /// How it moves.
    pub kind: FigureKind,
    /// What tells it from others of its name.
    pub labels: Vec<(String, String)>,
    /// Its value.
    pub value: f64,
}

/// Who watches a process.
pub trait Observer: Debug + Send + Sync {
    /// Are spans sent at all?
    fn takes_spans(&self) -> bool;
    /// Is this trace recorded? `parent` is what the process before decided; none: the trace begins here.
    fn records(&self, trace: [u8; 16], parent: Option<bool>) -> bool;
    /// Takes spans. Never waits: what finds no room is dropped.
    fn spans(&self, spans: Vec<Span>);
    /// How often figures are wanted; none: never.
    fn figures_every(&self) -> Option<Duration>;
    /// Takes figures, all of each name at once.
    fn figures(&self, figures: Vec<Figure>);
}

/// The observer of a process; none: nobody watches.
pub type Observing = Option<Arc<dyn Observer>>;

/// Is this context's trace recorded, and are spans sent?
#[must_use]
pub fn is_recorded(observer: &Observing, context: &TraceContext) -> bool {
    observer.as_ref().is_some_and(|o| o.takes_spans() && o.records(context.trace(), Some(context.sampled())))
}
