//! How far a template is: what whoever waits for it can be shown.
//!
//! Owns the words and counting bytes. Does not own who is told: whoever makes the templates gives a callback.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use volley_jobspecs::wire::work::TemplateStage;

use super::TemplateName;

/// Between two steps of one phase at least so many bytes are moved: a callback for each chunk would be told of 800 for 100 MiB.
const STEP_BYTES: u64 = 4 << 20;

/// What is done for a template.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Phase {
    /// It is looked for in the bucket.
    Looking,
    /// Another worker builds it.
    Waiting {
        /// Which.
        by: String,
    },
    /// It is fetched.
    Fetching,
    /// A first machine is restored from what was fetched.
    Proving,
    /// A machine is booted, warmed and saved.
    Building,
    /// It was built here and can be used; it is being sent to the bucket.
    Uploading,
    /// It is there.
    Ready,
    /// It is not, and why.
    Failed(String),
}

impl Phase {
    /// What whoever waits for the template is told; nothing when it is there, or will not be.
    #[must_use]
    pub fn stage(&self) -> Option<TemplateStage> {
        match self {
            Self::Building => Some(TemplateStage::Building),
            Self::Waiting { .. } => Some(TemplateStage::Awaited),
            Self::Fetching | Self::Proving => Some(TemplateStage::Fetching),
            Self::Looking | Self::Uploading | Self::Ready | Self::Failed(_) => None,
        }
    }
}

/// One step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// Of which template.
    pub template: TemplateName,
    /// What is done.
    pub phase: Phase,
    /// Plain bytes moved, while something is fetched or sent; else 0.
    pub done_bytes: u64,
    /// Of so many; about, while something is sent.
    pub of_bytes: u64,
}

/// Who is told of steps. The callback is called from the worker's threads and must not block.
#[derive(Clone)]
pub struct Steps(Arc<dyn Fn(Step) + Send + Sync>);

impl Steps {
    pub(super) fn tell(&self, step: Step) {
        (self.0)(step);
    }

    /// Calls this for each step.
    pub fn new(tell: impl Fn(Step) + Send + Sync + 'static) -> Self {
        Self(Arc::new(tell))
    }
}

impl fmt::Debug for Steps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Steps")
    }
}

/// Tells of one template's steps, if anybody wants to hear.
#[derive(Debug, Clone)]
pub(super) struct Teller {
    steps: Option<Steps>,
    template: TemplateName,
}

impl Teller {
    pub(super) fn new(steps: Option<Steps>, template: TemplateName) -> Self {
        Self { steps, template }
    }

    pub(super) fn tell(&self, phase: Phase) {
        self.at(phase, 0, 0);
    }

    fn at(&self, phase: Phase, done_bytes: u64, of_bytes: u64) {
        if let Some(Steps(tell)) = &self.steps {
            tell(Step { template: self.template, phase, done_bytes, of_bytes });
        }
    }

    /// A phase in which bytes are moved; it begins now.
    pub(super) fn progress(&self, phase: Phase, of_bytes: u64) -> Progress<'_> {
        self.at(phase.clone(), 0, of_bytes);
        Progress { teller: self, phase, of_bytes, done: AtomicU64::new(0) }
    }
}

/// Counts bytes of a phase.
#[derive(Debug)]
pub(super) struct Progress<'a> {
    teller: &'a Teller,
    phase: Phase,
    of_bytes: u64,
    done: AtomicU64,
}

impl Progress<'_> {
    /// So many more; told every so often and at the end.
    pub(super) fn add(&self, bytes: u64) {
        let before = self.done.fetch_add(bytes, Ordering::Relaxed);
        let done = before + bytes;
        if before / STEP_BYTES != done / STEP_BYTES || done == self.of_bytes {
            self.teller.at(self.phase.clone(), done.min(self.of_bytes), self.of_bytes);
        }
    }
}
