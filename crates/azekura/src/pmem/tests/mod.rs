//! Tests of the tree on each persistence backend.
//!
//! Modules: [`fixture`] (a tree with its model), [`model`] (against a map), [`crash`], [`damage`], [`threads`],
//! [`schedules`], [`seqno_schedules`] (concurrent writers), [`space`] (overhead of records).

mod crash;
mod damage;
mod fixture;
mod model;
mod schedules;
mod seqno_schedules;
mod space;
mod threads;
