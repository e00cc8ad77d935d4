//! Events that wait for the listener.
//!
//! An event is often known under a lock or in the middle of a task, and a listener may call back into the database. So
//! the event is queued there, and delivered where its thread holds nothing: by a thread of its own, or, where the
//! database has no threads, at the end of the call that caused it. One thread delivers at a time, so a listener gets
//! one event after the other, in the order in which they were queued, also those that it causes itself.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use crate::base::event::{Event, Listener};
use crate::base::sync::{WakeSignal, lock};
use crate::base::{Error, ErrorKind, Result};

/// Events that may wait. [`Event::Poisoned`] and [`Event::Closed`], of which there is one each, wait beside them.
const QUEUED_EVENTS_MAX: usize = 1024;

/// The queue of a listener. Thread safe.
pub(crate) struct EventQueue {
    listener: Option<Arc<dyn Listener>>,
    state: Mutex<EventQueueState>,
    /// Whether a thread of the database delivers; it waits for `queued`.
    has_thread: AtomicBool,
    ended: AtomicBool,
    queued: WakeSignal,
}

struct EventQueueState {
    waiting: VecDeque<Event>,
    /// A thread is delivering, and will deliver what is queued meanwhile.
    delivering: bool,
}

impl EventQueue {
    /// Nothing is delivered before [`begin`](EventQueue::start_delivery).
    pub(crate) fn new(listener: Option<Arc<dyn Listener>>) -> EventQueue {
        EventQueue {
            listener,
            state: Mutex::new(EventQueueState { waiting: VecDeque::new(), delivering: true }),
            has_thread: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            queued: WakeSignal::default(),
        }
    }

    /// Whether there is a listener.
    pub(crate) fn has_listener(&self) -> bool {
        self.listener.is_some()
    }

    /// Queues an event. It may be called with any lock held, and from a listener.
    pub(crate) fn push(&self, event: &Event) {
        if self.listener.is_none() {
            return;
        }
        let mut queue = lock(&self.state);
        if queue.waiting.len() < QUEUED_EVENTS_MAX || matches!(event, Event::Poisoned { .. } | Event::Closed) {
            queue.waiting.push_back(event.clone());
        } else if let Some(Event::EventsDropped { count }) = queue.waiting.back_mut() {
            *count += 1;
        } else {
            queue.waiting.push_back(Event::EventsDropped { count: 1 });
        }
        drop(queue);
        self.queued.notify_all();
    }

    /// Delivers all events that wait, unless another thread does. The caller holds no lock and has no work under way.
    /// False if the listener panicked.
    fn deliver(&self) -> bool {
        let mut calm = true;
        if !std::mem::replace(&mut lock(&self.state).delivering, true) {
            calm = self.drain();
        }
        calm
    }

    fn drain(&self) -> bool {
        let mut calm = true;
        loop {
            let mut queue = lock(&self.state);
            let Some(event) = queue.waiting.pop_front() else {
                queue.delivering = false;
                return calm;
            };
            drop(queue);
            if let Some(listener) = &self.listener {
                calm &= catch_unwind(AssertUnwindSafe(|| listener.on_event(&event))).is_ok();
            }
        }
    }

    /// The database is open: delivers what was queued until now, in the thread that opens it. From now on others may.
    /// False if the listener panicked.
    pub(crate) fn start_delivery(&self) -> bool {
        self.drain()
    }

    /// Delivers at the end of a call, if no thread does it. False if the listener panicked.
    pub(crate) fn deliver_at_call_end(&self) -> bool {
        self.listener.is_none() || self.has_thread.load(Ordering::Acquire) || self.deliver()
    }

    /// From now on a thread delivers, which calls [`run`](EventQueue::run).
    pub(crate) fn use_delivery_thread(&self) {
        self.has_thread.store(true, Ordering::Release);
    }

    /// Delivers until the events end; tells `panicked` each time the listener has.
    pub(crate) fn run(&self, panicked: impl Fn()) {
        loop {
            let seen = self.queued.generation();
            let ended = self.ended.load(Ordering::Acquire);
            if !self.deliver() {
                panicked();
            }
            if ended {
                return;
            }
            self.queued.wait_past(seen, 1_000);
        }
    }

    /// No event comes any more: [`run`](EventQueue::run) returns when it has delivered those that wait.
    pub(crate) fn stop(&self) {
        self.ended.store(true, Ordering::Release);
        self.queued.notify_all();
        self.has_thread.store(false, Ordering::Release);
    }
}

/// Set once, by the first failed sync of log or manifest, or by a panic; reads go on, writes fail. After a failed sync
/// the kernel may have marked the pages clean, so neither a retry nor a later sync proves anything: only opening the
/// database anew does.
pub(crate) struct DbPoison {
    error: OnceLock<Error>,
    events: EventQueue,
}

impl DbPoison {
    pub(crate) fn new(listener: Option<Arc<dyn Listener>>) -> DbPoison {
        DbPoison { error: OnceLock::new(), events: EventQueue::new(listener) }
    }

    /// Poisons; returns the error that writers get.
    pub(crate) fn set(&self, cause: Error) -> Error {
        let error = cause.with_kind(ErrorKind::Poisoned);
        if self.error.set(error.clone()).is_ok() {
            self.emit(&Event::Poisoned { error: error.clone() });
        }
        error
    }

    /// Fails if poisoned.
    #[inline]
    pub(crate) fn check(&self) -> Result<()> {
        match self.error.get() {
            None => Ok(()),
            Some(error) => Err(error.clone()),
        }
    }

    pub(crate) fn is_set(&self) -> bool {
        self.error.get().is_some()
    }

    /// Queues an event for the listener, which may poison by a panic when it gets it.
    pub(crate) fn emit(&self, event: &Event) {
        self.events.push(event);
    }

    /// The events for the listener; what delivers them reports a panic by [`heard`](DbPoison::record_delivery).
    pub(crate) fn events(&self) -> &EventQueue {
        &self.events
    }

    /// Notes whether the listener took its events `calm`ly, or panicked.
    pub(crate) fn record_delivery(&self, calm: bool) {
        if !calm {
            let error = Error::new(ErrorKind::Poisoned, "a listener panicked");
            let _already = self.error.set(error);
        }
    }

    /// Passes a result on, and poisons if it failed in a way that ends writing.
    pub(crate) fn poison_on_failure<T>(&self, result: Result<T>) -> Result<T> {
        result.map_err(|error| if error.kind() == ErrorKind::Poisoned { self.set(error) } else { error })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Notes events, and queues another one at the first.
    #[derive(Default)]
    struct RecordingListener {
        received: Mutex<Vec<String>>,
        events: Mutex<Option<Arc<EventQueue>>>,
    }

    impl Listener for RecordingListener {
        fn on_event(&self, event: &Event) {
            lock(&self.received).push(format!("{event:?}"));
            if let Some(events) = lock(&self.events).take() {
                events.push(&Event::Closed);
                assert!(events.deliver_at_call_end(), "the call that is delivering goes on");
            }
        }
    }

    fn flushed(n: u64) -> Event {
        Event::Flushed { partition: String::new(), tables: n, bytes: 0 }
    }

    #[test]
    fn events_are_delivered_one_after_the_other() {
        let notes = Arc::new(RecordingListener::default());
        let events = Arc::new(EventQueue::new(Some(notes.clone())));
        *lock(&notes.events) = Some(Arc::clone(&events));
        events.push(&flushed(1));
        events.push(&flushed(2));
        assert!(events.deliver_at_call_end() && lock(&notes.received).is_empty(), "the database is not open yet");
        assert!(events.start_delivery());
        let heard = std::mem::take(&mut *lock(&notes.received));
        assert_eq!(heard, [format!("{:?}", flushed(1)), format!("{:?}", flushed(2)), "Closed".to_owned()]);
    }

    #[test]
    fn events_are_counted_when_too_many_wait() {
        let notes = Arc::new(RecordingListener::default());
        let events = EventQueue::new(Some(notes.clone()));
        (0..2 * QUEUED_EVENTS_MAX as u64).for_each(|n| events.push(&flushed(n)));
        events.push(&Event::Closed);
        events.start_delivery();
        let heard = lock(&notes.received);
        assert_eq!(heard.len(), QUEUED_EVENTS_MAX + 2);
        let dropped = Event::EventsDropped { count: QUEUED_EVENTS_MAX as u64 };
        assert_eq!(heard[QUEUED_EVENTS_MAX..], [format!("{dropped:?}"), "Closed".to_owned()]);
    }

    struct PanickingListener;
    impl Listener for PanickingListener {
        fn on_event(&self, _: &Event) {
            panic!("listener");
        }
    }

    #[test]
    fn first_error_stays_and_listener_panic_poisons() {
        let poison = DbPoison::new(None);
        poison.check().unwrap();
        poison.set(Error::new(ErrorKind::Io, "first"));
        poison.set(Error::new(ErrorKind::Io, "second"));
        let error = poison.check().unwrap_err();
        assert_eq!((error.kind(), error.message()), (ErrorKind::Poisoned, "first"));

        let poison = DbPoison::new(Some(Arc::new(PanickingListener)));
        poison.emit(&Event::Closed);
        poison.record_delivery(poison.events().start_delivery());
        assert!(poison.check().is_err());
    }
}
