//! Events that wait for the listener.
//!
//! An event is often known under a lock or in the middle of a task, and a listener may call back into the database. So
//! the event is queued there, and delivered where its thread holds nothing: by a thread of its own, or, where the
//! database has no threads, at the end of the call that caused it. One thread delivers at a time, so a listener gets
//! one event after the other, in the order in which they were queued, also those that it causes itself.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use crate::base::event::{Event, Listener};
use crate::base::sync::{Bell, lock};

/// Events that may wait. [`Event::Poisoned`] and [`Event::Closed`], of which there is one each, wait beside them.
const WAITING_MAX: usize = 1024;

/// The queue of a listener. Thread safe.
pub(crate) struct Events {
    listener: Option<Arc<dyn Listener>>,
    queue: Mutex<Queue>,
    /// Whether a thread of the database delivers; it waits for `queued`.
    has_thread: AtomicBool,
    ended: AtomicBool,
    queued: Bell,
}

struct Queue {
    waiting: VecDeque<Event>,
    /// A thread is delivering, and will deliver what is queued meanwhile.
    delivering: bool,
}

impl Events {
    /// Nothing is delivered before [`begin`](Events::begin).
    pub(crate) fn new(listener: Option<Arc<dyn Listener>>) -> Events {
        Events {
            listener,
            queue: Mutex::new(Queue { waiting: VecDeque::new(), delivering: true }),
            has_thread: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            queued: Bell::default(),
        }
    }

    /// Whether there is a listener.
    pub(crate) fn are_heard(&self) -> bool {
        self.listener.is_some()
    }

    /// Queues an event. It may be called with any lock held, and from a listener.
    pub(crate) fn push(&self, event: &Event) {
        if self.listener.is_none() {
            return;
        }
        let mut queue = lock(&self.queue);
        if queue.waiting.len() < WAITING_MAX || matches!(event, Event::Poisoned { .. } | Event::Closed) {
            queue.waiting.push_back(event.clone());
        } else if let Some(Event::Dropped { count }) = queue.waiting.back_mut() {
            *count += 1;
        } else {
            queue.waiting.push_back(Event::Dropped { count: 1 });
        }
        drop(queue);
        self.queued.ring();
    }

    /// Delivers all events that wait, unless another thread does. The caller holds no lock and has no work under way.
    /// False if the listener panicked.
    fn deliver(&self) -> bool {
        let mut calm = true;
        if !std::mem::replace(&mut lock(&self.queue).delivering, true) {
            calm = self.drain();
        }
        calm
    }

    fn drain(&self) -> bool {
        let mut calm = true;
        loop {
            let mut queue = lock(&self.queue);
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
    pub(crate) fn begin(&self) -> bool {
        self.drain()
    }

    /// Delivers at the end of a call, if no thread does it. False if the listener panicked.
    pub(crate) fn end_of_call(&self) -> bool {
        self.listener.is_none() || self.has_thread.load(Ordering::Acquire) || self.deliver()
    }

    /// From now on a thread delivers, which calls [`run`](Events::run).
    pub(crate) fn expect_thread(&self) {
        self.has_thread.store(true, Ordering::Release);
    }

    /// Delivers until the events end; tells `panicked` each time the listener has.
    pub(crate) fn run(&self, panicked: impl Fn()) {
        loop {
            let seen = self.queued.count();
            let ended = self.ended.load(Ordering::Acquire);
            if !self.deliver() {
                panicked();
            }
            if ended {
                return;
            }
            self.queued.wait(seen, 1_000);
        }
    }

    /// No event comes any more: [`run`](Events::run) returns when it has delivered those that wait.
    pub(crate) fn end(&self) {
        self.ended.store(true, Ordering::Release);
        self.queued.ring();
        self.has_thread.store(false, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Notes events, and queues another one at the first.
    #[derive(Default)]
    struct Notes {
        heard: Mutex<Vec<String>>,
        events: Mutex<Option<Arc<Events>>>,
    }

    impl Listener for Notes {
        fn on_event(&self, event: &Event) {
            lock(&self.heard).push(format!("{event:?}"));
            if let Some(events) = lock(&self.events).take() {
                events.push(&Event::Closed);
                assert!(events.end_of_call(), "the call that is delivering goes on");
            }
        }
    }

    fn flushed(n: u64) -> Event {
        Event::Flushed { partition: String::new(), tables: n, bytes: 0 }
    }

    #[test]
    fn events_are_delivered_one_after_the_other() {
        let notes = Arc::new(Notes::default());
        let events = Arc::new(Events::new(Some(notes.clone())));
        *lock(&notes.events) = Some(Arc::clone(&events));
        events.push(&flushed(1));
        events.push(&flushed(2));
        assert!(events.end_of_call() && lock(&notes.heard).is_empty(), "the database is not open yet");
        assert!(events.begin());
        let heard = std::mem::take(&mut *lock(&notes.heard));
        assert_eq!(heard, [format!("{:?}", flushed(1)), format!("{:?}", flushed(2)), "Closed".to_owned()]);
    }

    #[test]
    fn events_are_counted_when_too_many_wait() {
        let notes = Arc::new(Notes::default());
        let events = Events::new(Some(notes.clone()));
        (0..2 * WAITING_MAX as u64).for_each(|n| events.push(&flushed(n)));
        events.push(&Event::Closed);
        events.begin();
        let heard = lock(&notes.heard);
        assert_eq!(heard.len(), WAITING_MAX + 2);
        let dropped = Event::Dropped { count: WAITING_MAX as u64 };
        assert_eq!(heard[WAITING_MAX..], [format!("{dropped:?}"), "Closed".to_owned()]);
    }
}
