//! Queue of events for the listener of a database.
//!
//! Events occur while locks are held or inside tasks, and a listener may call the database. So an event is queued where
//! it occurs, and delivered by a thread that holds no lock: by a delivery thread, or, in a database without threads, at
//! the end of the call that caused the event. One thread delivers at a time, so a listener gets the events one after
//! the other in the order of the queue, including events that the listener causes.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use crate::base::event::{Event, Listener};
use crate::base::sync::{WakeSignal, lock};

/// Maximum number of queued events. [`Event::Poisoned`] and [`Event::Closed`], which occur once each, and the count of
/// dropped events are queued beyond this maximum.
const QUEUED_EVENTS_MAX: usize = 1024;

/// Maximum number of events beyond [`QUEUED_EVENTS_MAX`]: the two that occur once, and the counts of dropped events
/// before, between and behind them.
const EXTRA_EVENTS_MAX: usize = 5;

/// Queue of events for one listener. Thread safe.
pub(crate) struct EventQueue {
    listener: Option<Arc<dyn Listener>>,
    state: Mutex<EventQueueState>,
    /// Whether a delivery thread runs or ran [`run`](EventQueue::run).
    has_thread: AtomicBool,
    /// Notified for each queued event.
    queued: WakeSignal,
}

struct EventQueueState {
    waiting: VecDeque<Event>,
    /// Whether a thread is delivering; it also delivers events that are queued meanwhile. True before
    /// [`start_delivery`](EventQueue::start_delivery), so that no other thread delivers.
    delivering: bool,
    /// Whether `Closed`, the last event, was queued.
    closed: bool,
}

impl EventQueue {
    /// Creates an empty queue. No event is delivered before [`start_delivery`](EventQueue::start_delivery).
    pub(crate) fn new(listener: Option<Arc<dyn Listener>>) -> EventQueue {
        EventQueue {
            listener,
            state: Mutex::new(EventQueueState { waiting: VecDeque::new(), delivering: true, closed: false }),
            has_thread: AtomicBool::new(false),
            queued: WakeSignal::default(),
        }
    }

    /// Returns whether there is a listener.
    pub(crate) fn has_listener(&self) -> bool {
        self.listener.is_some()
    }

    /// Queues an event, unless it follows `Closed`. If the queue is full, counts the event as dropped. The caller may
    /// hold any lock, and may be a listener.
    pub(crate) fn push(&self, event: &Event) {
        if self.listener.is_none() {
            return;
        }
        let mut queue = lock(&self.state);
        if queue.closed {
            return;
        }
        queue.closed = matches!(event, Event::Closed);
        if queue.waiting.len() < QUEUED_EVENTS_MAX || matches!(event, Event::Poisoned { .. } | Event::Closed) {
            queue.waiting.push_back(event.clone());
        } else if let Some(Event::EventsDropped { count }) = queue.waiting.back_mut() {
            *count += 1;
        } else {
            queue.waiting.push_back(Event::EventsDropped { count: 1 });
        }
        debug_assert!(queue.waiting.len() <= QUEUED_EVENTS_MAX + EXTRA_EVENTS_MAX, "the queue is bounded");
        drop(queue);
        self.queued.notify_all();
    }

    /// Delivers all queued events, unless another thread is delivering. The caller must hold no lock and must not be
    /// inside work. Returns false if the listener panicked.
    fn deliver(&self) -> bool {
        let is_delivering = std::mem::replace(&mut lock(&self.state).delivering, true);
        is_delivering || self.drain()
    }

    fn drain(&self) -> bool {
        let mut succeeded = true;
        loop {
            let mut queue = lock(&self.state);
            debug_assert!(queue.delivering, "one thread at a time delivers");
            let Some(event) = queue.waiting.pop_front() else {
                queue.delivering = false;
                return succeeded;
            };
            drop(queue);
            if let Some(listener) = &self.listener {
                succeeded &= catch_unwind(AssertUnwindSafe(|| listener.on_event(&event))).is_ok();
            }
        }
    }

    /// Delivers the events that were queued while the database was opened, in the opening thread. Afterwards every
    /// thread may deliver. Returns false if the listener panicked.
    pub(crate) fn start_delivery(&self) -> bool {
        self.drain()
    }

    /// Delivers queued events at the end of a call if there is no delivery thread. Returns false if the listener
    /// panicked.
    pub(crate) fn deliver_at_call_end(&self) -> bool {
        self.listener.is_none() || self.has_thread.load(Ordering::Acquire) || self.deliver()
    }

    /// Leaves the delivery to a thread that calls [`run`](EventQueue::run).
    pub(crate) fn use_delivery_thread(&self) {
        self.has_thread.store(true, Ordering::Release);
    }

    /// Delivers events through `Closed`; calls `on_panic` after deliveries in which the listener panicked.
    pub(crate) fn run(&self, on_panic: impl Fn()) {
        loop {
            let seen = self.queued.generation();
            let closed = lock(&self.state).closed;
            if !self.deliver() {
                on_panic();
            }
            if closed {
                return;
            }
            self.queued.wait_past(seen, 1_000);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Records events, and queues `Closed` when it gets the first one.
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
                assert!(events.deliver_at_call_end(), "the running delivery delivers the new event");
            }
        }
    }

    fn flushed(n: u64) -> Event {
        Event::Flushed { partition: String::new(), tables: n, bytes: 0 }
    }

    #[test]
    fn events_are_delivered_in_queue_order() {
        let listener = Arc::new(RecordingListener::default());
        let events = Arc::new(EventQueue::new(Some(listener.clone())));
        *lock(&listener.events) = Some(Arc::clone(&events));
        events.push(&flushed(1));
        events.push(&flushed(2));
        assert!(events.deliver_at_call_end() && lock(&listener.received).is_empty(), "the database is not open yet");
        assert!(events.start_delivery());
        let received = std::mem::take(&mut *lock(&listener.received));
        assert_eq!(received, [format!("{:?}", flushed(1)), format!("{:?}", flushed(2)), "Closed".to_owned()]);
    }

    /// A flush queued its event after its work had ended. If the database was closed in between, the event followed
    /// `Closed`.
    #[test]
    fn no_event_follows_closed() {
        let listener = Arc::new(RecordingListener::default());
        let events = EventQueue::new(Some(listener.clone()));
        [flushed(1), Event::Closed, flushed(2)].iter().for_each(|event| events.push(event));
        assert!(events.start_delivery());
        assert_eq!(*lock(&listener.received), [format!("{:?}", flushed(1)), "Closed".to_owned()]);
    }

    #[test]
    fn events_are_dropped_and_counted_when_full() {
        let listener = Arc::new(RecordingListener::default());
        let events = EventQueue::new(Some(listener.clone()));
        (0..2 * QUEUED_EVENTS_MAX as u64).for_each(|n| events.push(&flushed(n)));
        events.push(&Event::Closed);
        events.start_delivery();
        let received = lock(&listener.received);
        assert_eq!(received.len(), QUEUED_EVENTS_MAX + 2);
        let dropped = Event::EventsDropped { count: QUEUED_EVENTS_MAX as u64 };
        assert_eq!(received[QUEUED_EVENTS_MAX..], [format!("{dropped:?}"), "Closed".to_owned()]);
    }
}
