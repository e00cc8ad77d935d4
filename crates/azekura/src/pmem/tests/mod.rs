//! What a tree must do, whatever it stands on: against a map, through crashes, on damaged bytes, beside others.
//!
//! Rooms: [`world`] (a tree beside its model), [`model`], [`crash`], [`damage`], [`threads`], [`schedules`],
//! [`turn_schedules`] (writers beside each other), [`speed`] (ignored).

mod crash;
mod damage;
mod fixture;
mod model;
mod schedules;
mod seqno_schedules;
mod speed;
mod threads;
