//! Requests of clients and of strangers.

use crate::cluster::{Cluster, answer, client_with_timeout, wait_for};
use reqwest::header::{ALLOW, ETAG, IF_MATCH, IF_NONE_MATCH, RETRY_AFTER};
use reqwest::{Certificate, Client, Method, RequestBuilder, Response, StatusCode};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::sync::Mutex;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};
use tokio::process::Command;

/// The word that says why a request failed, once there is a leader.
async fn error_of(request: RequestBuilder) -> (StatusCode, String) {
    error_in(answer(request).await).await
}

async fn error_in(response: Response) -> (StatusCode, String) {
    let status = response.status();
    let body: Value = response.json().await.unwrap_or_default();
    (status, body["error"].as_str().unwrap_or_default().to_owned())
}

fn error(status: u16, word: &str) -> (StatusCode, String) {
    (StatusCode::from_u16(status).unwrap(), word.to_owned())
}

#[tokio::test(flavor = "multi_thread")]
async fn records_are_written_and_read() {
    let cluster = Cluster::of_three(&[]).await;
    let path = "/kv/caf%C3%A9/%00%ff/a%20b"; // a key with bytes that are not UTF-8, and a slash
    assert_eq!(error_of(cluster.get(2, path)).await, error(404, "not-found"));
    assert!(answer(cluster.put(2, path, "one")).await.status().is_success());
    let response = answer(cluster.get(3, path)).await;
    let etag = response.headers()[ETAG].clone();
    assert_eq!(response.bytes().await.unwrap(), "one");

    let put = |body: &'static str| cluster.put(1, path, body);
    assert_eq!(error_of(put("two").header(IF_NONE_MATCH, "*")).await, error(409, "conflict"));
    assert!(answer(put("two").header(IF_MATCH, &etag)).await.status().is_success());
    assert_eq!(error_of(put("three").header(IF_MATCH, &etag)).await, error(409, "conflict"));
    assert_eq!(error_of(put("three").header(IF_MATCH, "two")).await, error(400, "invalid"));
    assert!(answer(put("three").header(IF_MATCH, "*")).await.status().is_success());
    let delete = || cluster.request(Method::DELETE, 3, path);
    assert!(answer(delete()).await.status().is_success());
    assert_eq!(error_of(delete().header(IF_MATCH, "*")).await, error(409, "conflict"));
    assert_eq!(error_of(cluster.get(1, path)).await, error(404, "not-found"));
}

#[tokio::test(flavor = "multi_thread")]
async fn scans_return_pages() {
    let cluster = Cluster::of_three(&[]).await;
    let change = |partition: &str, key: String| json!({ "partition": partition, "key": key, "value": "eA==" });
    let changes: Vec<Value> = (0..25).map(|i| change("p", format!("%FF{i:02}"))).collect();
    let others = ["o", "q", "pp"].map(|partition| change(partition, "%FF00".into()));
    let changes = [changes, others.to_vec(), vec![change("p", "a".into())]].concat();
    let batch = json!({ "changes": changes });
    assert!(answer(cluster.post(1, "/batch", &batch)).await.status().is_success());
    let (mut keys, mut after, mut pages) = (Vec::new(), String::new(), 0);
    loop {
        let path = format!("/kv/p?prefix=%FF&limit=10{after}");
        let page: Value = answer(cluster.get(2, &path)).await.json().await.unwrap();
        keys.extend(
            page["records"].as_array().unwrap().iter().map(|record| record["key"].as_str().unwrap().to_owned()),
        );
        pages += 1;
        match page["next"].as_str() {
            Some(next) => after = format!("&after={next}"),
            None => break,
        }
    }
    assert_eq!((keys, pages), ((0..25).map(|i| format!("%FF{i:02}")).collect(), 3));
    let removal = json!({ "changes": [{ "partition": "p", "prefix": "%FF" }] });
    assert!(answer(cluster.post(1, "/batch", &removal)).await.status().is_success());
    let page: Value = answer(cluster.get(1, "/kv/p")).await.json().await.unwrap();
    assert_eq!(page, json!({ "records": [{ "key": "a", "value": "eA==" }] }));
    let page: Value = answer(cluster.get(1, "/kv/pp")).await.json().await.unwrap();
    assert_eq!(page["records"].as_array().unwrap().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn batches_change_all_or_nothing() {
    let cluster = Cluster::of_three(&[]).await;
    let send = |body: Value| cluster.post(3, "/batch", &body);
    let set = |key: &str, value: &str| json!({ "partition": "p", "key": key, "value": value });
    let absent = |key: &str| json!({ "partition": "p", "key": key });
    let first = json!({ "conditions": [absent("a")], "changes": [set("a", "eA=="), set("b", "eQ==")] });
    assert!(answer(send(first.clone())).await.status().is_success());
    let refused: Value = answer(send(first)).await.json().await.unwrap();
    assert_eq!((&refused["partition"], &refused["key"]), (&json!("p"), &json!("a")));
    let second = json!({ "conditions": [set("a", "eA=="), absent("c")], "changes": [absent("a"), set("c", "eA==")] });
    assert!(answer(send(second)).await.status().is_success());
    assert_eq!(answer(cluster.get(1, "/kv/p/a")).await.status(), StatusCode::NOT_FOUND);
    assert_eq!(answer(cluster.get(1, "/kv/p/c")).await.bytes().await.unwrap(), "x");
}

#[tokio::test(flavor = "multi_thread")]
async fn bad_requests_are_refused() {
    let cluster = Cluster::of_three(&["--max-write-len", "100000"]).await;
    let long = json!({ "changes": [{ "partition": "p", "key": "k".repeat(65_534) }] });
    assert_eq!(error_of(cluster.post(1, "/batch", &long)).await, error(400, "invalid"));
    assert_eq!(error_of(cluster.put(1, &format!("/kv/{}/k", "p".repeat(256)), "x")).await, error(400, "invalid"));
    assert_eq!(error_of(cluster.put(1, "/kv/%FF/k", "x")).await, error(400, "invalid"));
    assert_eq!(error_of(cluster.put(1, "/kv/p/k", vec![0; 100_000])).await, error(413, "too-large"));
    // The connection may end before all of the body is sent, so it is not one that is used again.
    let url = format!("{}/kv/p/k", cluster.address(1));
    let much_too_large = client_with_timeout(20).put(url).body(vec![0; 2 << 20]).send().await;
    assert!(much_too_large.is_err() || much_too_large.unwrap().status() == 413);
    for query in ["limit=0", "limit=10001", "limit=x", "stale=maybe", "order=descending"] {
        assert_eq!(error_of(cluster.get(1, &format!("/kv/p?{query}"))).await, error(400, "invalid"), "{query}");
    }
    let change = |change: Value| cluster.post(1, "/batch", &json!({ "changes": [change] }));
    for wrong in [
        json!({ "partition": "p", "value": "eA==" }),
        json!({ "partition": "p", "key": "k", "prefix": "k" }),
        json!({ "partition": "p", "prefix": "k", "value": "eA==" }),
        json!({ "partition": "p", "key": "k", "value": "no Base64" }),
        json!({ "partition": "", "key": "k" }),
    ] {
        assert_eq!(error_of(change(wrong.clone())).await, error(400, "invalid"), "{wrong}");
    }
    assert!(answer(change(json!({ "partition": "p", "key": "k", "colour": 1 }))).await.status().is_client_error());
    assert!(cluster.request(Method::POST, 1, "/batch").body("{").send().await.unwrap().status().is_client_error());
    let many = json!({ "changes": vec![json!({ "partition": "p", "key": "k" }); 10_001] });
    assert_eq!(error_of(cluster.post(1, "/batch", &many)).await, error(413, "too-large"));
    let init = json!({ "nodes": { "1": cluster.address(1) } });
    assert_eq!(error_of(cluster.post(1, "/cluster/init", &init)).await, error(409, "refused"));
    for address in ["127.0.0.1:1", "http://127.0.0.1:1?x", "http://127.0.0.1:1/x", "http://a:b@127.0.0.1:1", "ftp://h"]
    {
        let learner = cluster.post(1, "/cluster/add-learner", &json!({ "id": 4, "address": address }));
        assert_eq!(error_of(learner).await, error(400, "invalid"), "{address}");
    }
    // Regression: the condition was ignored.
    let conditional = cluster.post(1, "/batch", &json!({ "changes": [] })).header(IF_NONE_MATCH, "*");
    assert_eq!(error_of(conditional).await, error(400, "invalid"));
    let patch = answer(cluster.request(Method::PATCH, 1, "/kv/p/k")).await;
    assert_eq!(
        (patch.status(), &patch.headers()[ALLOW]),
        (StatusCode::METHOD_NOT_ALLOWED, &"GET,HEAD,PUT,DELETE".parse().unwrap())
    );
    let voters = json!({ "voters": [1, 9] });
    assert_eq!(error_of(cluster.post(1, "/cluster/change-membership", &voters)).await, error(409, "refused"));
    assert_eq!(answer(cluster.get(1, "/kv/p")).await.text().await.unwrap(), "{\"records\":[]}");
}

/// Messages that are not of the cluster change nothing, whatever is in them.
#[tokio::test(flavor = "multi_thread")]
async fn foreign_messages_are_refused() {
    let mut cluster = Cluster::of_three(&["--cluster", "mine"]).await;
    let before = cluster.metrics(2).await.unwrap();
    let health: Value = answer(cluster.get(2, "/health")).await.json().await.unwrap();
    let mine = health["cluster"].as_str().unwrap();
    let other_number =
        format!("mine/{:016x}", u64::from_str_radix(mine.strip_prefix("mine/").unwrap(), 16).unwrap() ^ 1);
    let message = |path: &str, cluster_name: &str, target: u64| {
        let request = cluster.request(Method::POST, 2, path).body(vec![0x80]);
        request.header("x-azekura-cluster", cluster_name).header("x-azekura-target", target)
    };
    let paths = ["append", "vote", "pre-vote", "transfer-leader", "snapshot", "snapshot/frame"];
    for path in paths.map(|path| format!("/raft/{path}")) {
        for name in [&mine.replace("mine", "theirs"), "mine", "mine/", &other_number] {
            assert_eq!(error_of(message(&path, name, 2)).await, error(421, "misdirected"), "{path} {name}");
        }
        assert_eq!(error_of(message(&path, mine, 3)).await, error(421, "misdirected"), "{path}");
        let (status, _) = error_of(message(&path, mine, 2)).await;
        assert!(status == 400 || status == 409, "{path}: {status}");
    }
    let after = cluster.metrics(2).await.unwrap();
    assert_eq!((&before["vote"], &before["current_term"]), (&after["vote"], &after["current_term"]));
    // A directory belongs to one node of one cluster.
    cluster.kill(2).await;
    for (id, name) in [("2", "theirs"), ("4", "mine")] {
        let mut command = cluster.command(2);
        let status = command.args(["--id", id, "--cluster", name]).status().await.unwrap();
        assert!(!status.success(), "node {id} of cluster {name}");
    }
    assert!(cluster.logs().contains("the directory is that of node 2 of cluster `mine`, not of node 4"));
    cluster.start(2).await;
    cluster.assert_nodes_agree("p").await;
}

/// Regression: only names told clusters apart. A cluster that got the address of a node of another one with the same
/// name replaced the log of that node.
#[tokio::test(flavor = "multi_thread")]
async fn clusters_of_the_same_name_stay_apart() {
    let (mut one, mut other) = (Cluster::new(&[]), Cluster::new(&[]));
    one.form(1..=1).await;
    // The other cluster has no node 1. Its node 2 has one entry more and a higher term.
    other.start(2).await;
    let nodes = json!({ "nodes": { "2": other.address(2) } });
    assert!(answer(other.post(2, "/cluster/init", &nodes)).await.status().is_success());
    assert!(answer(other.put(2, "/kv/p/k", "other")).await.status().is_success());
    assert!(answer(one.put(1, "/kv/p/k", "one")).await.status().is_success());
    let learner = one.post(1, "/cluster/add-learner", &json!({ "id": 2, "address": other.address(2) }));
    let adding = tokio::spawn(learner.send());
    wait_for("node 2 is a learner", || async {
        (one.metrics(1).await?["membership_config"]["membership"]["nodes"]["2"].is_object()).then_some(())
    })
    .await;
    // Long enough for messages, of which none may have an effect.
    for i in 0..20 {
        assert!(answer(one.put(1, "/kv/p/k", format!("{i}"))).await.status().is_success());
        assert!(answer(other.put(2, "/kv/p/other", format!("{i}"))).await.status().is_success());
    }
    adding.abort();
    assert_eq!(answer(other.get(2, "/kv/p/k")).await.text().await.unwrap(), "other");
    let removal = json!({ "id": 2 });
    assert!(answer(one.post(1, "/cluster/remove-learner", &removal)).await.status().is_success());
    assert_eq!(error_of(one.post(1, "/cluster/remove-learner", &removal)).await, error(409, "refused"));
    assert_eq!(error_of(one.post(1, "/cluster/remove-learner", &json!({ "id": 1 }))).await, error(409, "refused"));
}

/// Regression: answers to clients that do not read them took memory without a limit.
#[tokio::test(flavor = "multi_thread")]
async fn unread_answers_have_a_limit() {
    let mut cluster = Cluster::new(&["--max-request-mib", "17"]);
    cluster.form(1..=1).await;
    assert!(answer(cluster.put(1, "/kv/p/k", vec![b'v'; 7 << 20])).await.status().is_success());
    let mut slow = Vec::new();
    loop {
        let socket = TcpSocket::new_v4().unwrap();
        socket.set_recv_buffer_size(4 << 10).unwrap();
        let address = cluster.address(1).replace("http://", "").parse().unwrap();
        let mut stream = socket.connect(address).await.unwrap();
        stream.write_all(b"GET /kv/p/k HTTP/1.1\r\nHost: localhost\r\n\r\n").await.unwrap();
        let mut status = [0; 12];
        stream.read_exact(&mut status).await.unwrap();
        if status == *b"HTTP/1.1 503" {
            break;
        }
        slow.push(stream);
        assert!(slow.len() < 20, "no request is refused");
    }
    assert!((1..=3).contains(&slow.len()), "{} answers of 7 MiB wait", slow.len());
    drop(slow);
    assert_eq!(answer(cluster.get(1, "/kv/p/k")).await.bytes().await.unwrap().len(), 7 << 20);
}

/// Regression: each body counted as one of maximum length, so that 15 writes at the same time were the most.
#[tokio::test(flavor = "multi_thread")]
async fn small_bodies_take_little_of_the_limit() {
    let mut cluster = Cluster::new(&["--max-request-mib", "17"]);
    cluster.form(1..=1).await;
    let (address, mut writers) = (cluster.address(1).replace("http://", ""), Vec::new());
    for _ in 0..100 {
        let mut writer = TcpStream::connect(&address).await.unwrap();
        writer.write_all(b"PUT /kv/p/k HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\nx").await.unwrap();
        writers.push(writer);
    }
    for mut writer in writers {
        writer.write_all(b"y").await.unwrap();
        let mut status = [0; 12];
        writer.read_exact(&mut status).await.unwrap();
        assert_eq!(String::from_utf8_lossy(&status), "HTTP/1.1 200");
    }
}

/// Regression: a node whose limit of a write was lowered did not get earlier writes any more, nor anything after them.
#[tokio::test(flavor = "multi_thread")]
async fn lowered_limits_stop_no_replication() {
    let mut cluster = Cluster::of_three(&["--max-write-len", "30000000"]).await;
    let follower = cluster.wait_for_leader().await % 3 + 1;
    cluster.kill(follower).await;
    for value in [vec![b'l'; 25 << 20], b"last".to_vec()] {
        assert!(answer(cluster.put(follower % 3 + 1, "/kv/p/k", value)).await.status().is_success());
    }
    let node = cluster.command(follower).args(["--max-write-len", "1000"]).spawn().unwrap();
    cluster.nodes.insert(follower, node);
    wait_for("the node answers", || cluster.metrics(follower)).await;
    assert_eq!(cluster.assert_nodes_agree("p").await["k"], "bGFzdA==");
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_beyond_the_limit_wait() {
    let mut cluster = Cluster::new(&["--max-requests", "1"]);
    cluster.form(1..=1).await;
    assert!(answer(cluster.put(1, "/kv/p/k", "x")).await.status().is_success());
    // Requests whose bodies do not come. One that arrives during a read is refused itself, so each read has its own.
    let address = cluster.address(1).replace("http://", "");
    let slow = Mutex::new(Vec::new());
    let refused = wait_for("a request is refused", || async {
        let mut stream = TcpStream::connect(&address).await.unwrap();
        stream.write_all(b"PUT /kv/p/k HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n").await.unwrap();
        slow.lock().unwrap().push(stream);
        let response = cluster.get(1, "/kv/p/k").send().await.unwrap();
        (response.status() == StatusCode::SERVICE_UNAVAILABLE).then_some(response)
    });
    assert!(refused.await.headers().contains_key(RETRY_AFTER));
    drop(slow);
    assert_eq!(answer(cluster.get(1, "/kv/p/k")).await.status(), StatusCode::OK);
}

/// Regression: connections of strangers took all file handles, so that the log could not be written and Raft stopped.
#[tokio::test(flavor = "multi_thread")]
async fn connections_leave_files_to_the_database() {
    let mut cluster = Cluster::new(&[]);
    let node = cluster.command(1);
    let mut limited = Command::new("sh");
    limited.args(["-c", "ulimit -n 256 && exec \"$0\" \"$@\""]).arg(node.as_std().get_program());
    limited.args(node.as_std().get_args()).kill_on_drop(true);
    cluster.nodes.insert(1, limited.spawn().unwrap());
    wait_for("the node answers", || cluster.metrics(1)).await;
    let init = json!({ "nodes": { "1": cluster.address(1) } });
    assert!(answer(cluster.post(1, "/cluster/init", &init)).await.status().is_success());
    cluster.wait_for_leader().await;
    let (address, mut strangers) = (cluster.address(1).replace("http://", ""), Vec::new());
    let mut writer = TcpStream::connect(&address).await.unwrap();
    for i in 0..20 {
        let head = format!("PUT /kv/p/{i} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n\r\n", 4 << 20);
        writer.write_all(&[head.as_bytes(), &vec![0; 4 << 20]].concat()).await.unwrap();
        let mut answer = Vec::new();
        while !answer.ends_with(b"}") {
            assert!(writer.read_buf(&mut answer).await.unwrap() > 0, "the connection has ended");
        }
        let answer = String::from_utf8(answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 200 OK"), "write {i}: {answer}");
        // After the first write, the node has the writer's connection.
        while strangers.len() < 300 {
            strangers.push(TcpStream::connect(&address).await.unwrap());
        }
    }
}

/// Regression: of two calls that formed a cluster at once, the one that was refused removed the number of the cluster
/// that the other one had formed. No node joined it then.
#[tokio::test(flavor = "multi_thread")]
async fn cluster_is_formed_by_one_of_many_calls() {
    let mut cluster = Cluster::new(&[]);
    cluster.start(1).await;
    cluster.start(2).await;
    let init = json!({ "nodes": { "1": cluster.address(1) } });
    let calls: Vec<_> = (0..16).map(|_| tokio::spawn(cluster.post(1, "/cluster/init", &init).send())).collect();
    let mut formed = 0;
    for call in calls {
        formed += usize::from(call.await.unwrap().unwrap().status().is_success());
    }
    assert_eq!(formed, 1);
    cluster.wait_for_leader().await;
    let learner = json!({ "id": 2, "address": cluster.address(2) });
    assert!(answer(cluster.post(1, "/cluster/add-learner", &learner)).await.status().is_success());
}

#[tokio::test(flavor = "multi_thread")]
async fn nonsense_for_members_is_refused() {
    let mut cluster = Cluster::new(&[]);
    cluster.form(1..=1).await;
    cluster.start(2).await;
    let add = |id: u64, address: String| {
        cluster.post(1, "/cluster/add-learner", &json!({ "id": id, "address": address })).send()
    };
    assert!(add(2, cluster.address(2)).await.unwrap().status().is_success());
    assert!(add(2, cluster.address(2)).await.unwrap().status().is_success(), "once more");
    assert_eq!(add(2, cluster.address(3)).await.unwrap().status(), 409, "another address");
    assert_eq!(add(3, cluster.address(2)).await.unwrap().status(), 409, "the address of another node");
    let same = json!({ "nodes": { "4": cluster.address(4), "5": cluster.address(4) } });
    assert_eq!(error_of(cluster.post(2, "/cluster/init", &same)).await, error(400, "invalid"));
    let empty = json!({ "voters": [] });
    assert_eq!(error_of(cluster.post(1, "/cluster/change-membership", &empty)).await, error(409, "refused"));
    // Regression: a leader that was to transfer to a node that cannot lead refused all requests from then on.
    for to in [1, 2, 9] {
        let transfer = cluster.post(1, "/cluster/transfer-leader", &json!({ "to": to }));
        assert_eq!(error_of(transfer).await, error(409, "refused"), "to node {to}");
    }
    assert!(answer(cluster.put(1, "/kv/p/k", "x")).await.status().is_success());
}

/// Regression: the cluster stayed between the old and the new members when the client did not wait.
#[tokio::test(flavor = "multi_thread")]
async fn membership_changes_end_without_the_client() {
    let cluster = Cluster::of_three(&["--election-timeout-ms", "20000"]).await;
    let leader = cluster.wait_for_leader().await;
    // The change is refused while the first members are not committed.
    assert!(answer(cluster.put(leader, "/kv/p/k", "x")).await.status().is_success());
    let others: Vec<u64> = (1..=3).filter(|id| *id != leader).collect();
    others.iter().for_each(|id| cluster.signal(*id, Signal::STOP));
    let change = cluster.post(leader, "/cluster/change-membership", &json!({ "voters": [leader] }));
    let change = tokio::spawn(change.send());
    let configs = || async {
        let metrics = cluster.metrics(leader).await?;
        metrics["membership_config"]["membership"]["configs"].as_array().cloned()
    };
    wait_for("the change has begun", || async { (configs().await?.len() == 2).then_some(()) }).await;
    change.abort();
    assert!(change.await.unwrap_err().is_cancelled());
    others.iter().for_each(|id| cluster.signal(*id, Signal::CONT));
    wait_for("the change has ended", || async { (configs().await? == [json!([leader])]).then_some(()) }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_majority_nothing_is_promised() {
    let mut cluster = Cluster::of_three(&["--request-timeout-ms", "500"]).await;
    assert!(answer(cluster.put(1, "/kv/p/k", "x")).await.status().is_success());
    cluster.kill(2).await;
    cluster.kill(3).await;
    let (status, word) = error_in(cluster.put(1, "/kv/p/k", "y").send().await.unwrap()).await;
    // The node may still take itself for the leader, or know none.
    assert!([error(504, "unknown-outcome"), error(503, "no-leader")].contains(&(status, word.clone())), "{word}");
    let (status, word) = error_in(cluster.get(1, "/kv/p/k").send().await.unwrap()).await;
    assert!([error(503, "unavailable"), error(503, "no-leader")].contains(&(status, word.clone())), "{word}");
    assert_eq!(answer(cluster.get(1, "/kv/p/k?stale=true")).await.bytes().await.unwrap(), "x");
}

#[tokio::test(flavor = "multi_thread")]
async fn nodes_speak_tls_and_need_the_token() {
    let key = rcgen::generate_simple_self_signed(vec!["127.0.0.1".into(), "localhost".into()]).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, text: String| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let cert = file("cert.pem", key.cert.pem());
    let private = file("key.pem", key.signing_key.serialize_pem());
    let arguments = ["--token", "secret", "--tls-cert", &cert, "--tls-key", &private, "--tls-ca", &cert];
    let _ = rustls::crypto::ring::default_provider().install_default();
    let client = |token: Option<&str>| {
        let headers = token.map(|token| ("authorization".parse().unwrap(), format!("Bearer {token}").parse().unwrap()));
        let authority = Certificate::from_pem(key.cert.pem().as_bytes()).unwrap();
        let client = Client::builder().no_proxy().tls_certs_only([authority]);
        client.default_headers(headers.into_iter().collect()).build().unwrap()
    };
    let mut cluster = Cluster::with_tls(&arguments, client(Some("secret")));
    cluster.form(1..=3).await;
    let leader = cluster.wait_for_leader().await;
    assert!(answer(cluster.put(leader, "/kv/p/k", "x")).await.status().is_success());
    for (path, method) in [("/kv/p/k", Method::GET), ("/raft/vote", Method::POST), ("/metrics", Method::GET)] {
        for token in [None, Some("secre"), Some("secrets")] {
            let request = client(token).request(method.clone(), format!("{}{path}", cluster.address(leader)));
            assert_eq!(error_of(request).await, error(401, "unauthorized"), "{path} {token:?}");
        }
    }
    cluster.assert_nodes_agree("p").await;
    let learner = json!({ "id": 4, "address": cluster.address(4).replace("https", "http") });
    assert_eq!(error_of(cluster.post(leader, "/cluster/add-learner", &learner)).await, error(400, "invalid"));
    // Regression: the token was not sent to the leader.
    let mut load = Command::new(env!("CARGO_BIN_EXE_azekura-node"));
    load.args(["load", "--clients", "1", "--seconds", "1", "--token", "secret", "--tls-ca", &cert]);
    let load = load.args(["--address", &cluster.address(leader % 3 + 1)]).output().await.unwrap();
    let line: Value = serde_json::from_slice(&load.stdout).unwrap_or_else(|_| panic!("{load:?}"));
    assert!(line["writes_per_s"].as_u64() > Some(0), "{line}");
    let plain = client(None).get(cluster.address(leader).replace("https", "http")).send().await;
    assert!(plain.is_err() || !plain.unwrap().status().is_success());
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_are_in_the_open_format() {
    let mut cluster = Cluster::new(&[]);
    cluster.form(1..=1).await;
    assert!(answer(cluster.put(1, "/kv/p/k", "x")).await.status().is_success());
    let text = answer(cluster.get(1, "/metrics")).await.text().await.unwrap();
    for line in [
        "azekura_raft_is_leader 1.0",
        "azekura_http_requests_total{route=\"/kv/{partition}/{*key}\",status=\"200\"} 1",
        "# EOF",
    ] {
        assert!(text.lines().any(|found| found == line), "{line} is missing:\n{text}");
    }
    let commits = text.lines().find_map(|line| line.strip_prefix("azekura_database_commits ")).unwrap();
    assert!(commits.parse::<f64>().unwrap() >= 1.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_signal_ends_a_node_in_order() {
    let mut cluster = Cluster::new(&[]);
    cluster.form(1..=1).await;
    assert!(answer(cluster.put(1, "/kv/p/k", "x")).await.status().is_success());
    cluster.signal(1, Signal::TERM);
    assert!(cluster.nodes.get_mut(&1).unwrap().wait().await.unwrap().success(), "{}", cluster.logs());
    let beyond_loopback = cluster.command(1).args(["--listen", "0.0.0.0:0"]).status().await.unwrap();
    assert!(!beyond_loopback.success(), "a node beyond loopback needs TLS and a token");
    for name in ["", "two words", "caf\u{e9}"] {
        let unnamed = cluster.command(1).args(["--cluster", name]).status().await.unwrap();
        assert!(!unnamed.success(), "`{name}` cannot be in a header");
    }
    assert!(cluster.logs().contains("visible ASCII characters only, and at least one"));
    let too_large = cluster.command(1).args(["--max-write-len", "1000000000", "--max-request-mib", "4000"]).status();
    assert!(!too_large.await.unwrap().success(), "the log would refuse such a write");
    cluster.start(1).await;
    cluster.wait_for_leader().await;
    assert_eq!(answer(cluster.get(1, "/kv/p/k")).await.bytes().await.unwrap(), "x");
}
