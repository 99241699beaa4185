//! The chart's pods as Kubernetes runs them, but without it: command, arguments and variables of
//! the manifest, on a real PostgreSQL and a real Kafka. Folders that the pod mounts are below the
//! test's own folder, so a path in an argument or a variable that begins with a mount path begins
//! with that folder here. Nothing else of the manifest is changed.

use std::{
    collections::BTreeMap,
    fs::{self, Permissions},
    io::{BufRead, BufReader, Write},
    net::TcpStream,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use oncebox_control::MasterKey;
use oncebox_devkit::local::{free_port, process::Child};
use oncebox_tests::{
    http,
    kafka::KafkaServer,
    postgres::{admin_url, drop_database, with_database},
    program,
    temp_dir::TempDir,
    wait::{self, DEADLINE},
};
use openssl::ssl::{SslConnector, SslMethod};
use serde_json::{Value, json};

use super::{at, everything, field, manifest, merge, render};

/// Secrets of a namespace: their names, keys and contents.
type Secrets = BTreeMap<&'static str, BTreeMap<&'static str, String>>;

/// A pod of the rendered chart, with its volumes in a folder.
struct Pod {
    spec: Value,
    secrets: Secrets,
    root: PathBuf,
}

impl Pod {
    /// Makes the volumes of a pod, with the files that they have before it starts.
    fn prepare(manifests: &[Value], kind: &str, secrets: &Secrets, root: &Path) -> Self {
        let spec = field(manifests, &format!("{kind}/spec/template/spec"));
        let pod = Self { spec, secrets: secrets.clone(), root: root.join(kind) };
        for volume in pod.spec["volumes"].as_array().into_iter().flatten() {
            let dir = pod.root.join(volume["name"].as_str().unwrap());
            fs::create_dir_all(&dir).unwrap();
            if volume["emptyDir"].is_object() {
                // As Kubernetes makes it: every user may write to it.
                fs::set_permissions(&dir, Permissions::from_mode(0o777)).unwrap();
            }
            for (name, content) in pod.files(manifests, volume) {
                fs::write(dir.join(name), content).unwrap();
            }
        }
        pod
    }

    fn files(&self, manifests: &[Value], volume: &Value) -> BTreeMap<String, String> {
        if let Some(name) = volume["configMap"]["name"].as_str() {
            let map = manifest(manifests, "ConfigMap");
            assert_eq!(map["metadata"]["name"], json!(name));
            return serde_json::from_value(map["data"].clone()).unwrap();
        }
        let Some(name) = volume["secret"]["secretName"].as_str() else {
            assert!(volume["emptyDir"].is_object(), "{volume}");
            return BTreeMap::new();
        };
        let secret = &self.secrets[name];
        match volume["secret"]["items"].as_array() {
            None => secret.iter().map(|(key, text)| ((*key).to_owned(), text.clone())).collect(),
            Some(items) => items
                .iter()
                .map(|item| {
                    let (key, path) = (item["key"].as_str().unwrap(), item["path"].as_str());
                    (path.unwrap().to_owned(), secret[key].clone())
                })
                .collect(),
        }
    }

    /// A text of the manifest with its mounted folders where they are here.
    fn here(&self, container: &Value, text: &str) -> String {
        let word = |word: &str| {
            let mounts = container["volumeMounts"].as_array().into_iter().flatten();
            for mount in mounts {
                let path = mount["mountPath"].as_str().unwrap();
                let rest = word.strip_prefix(path);
                if let Some(rest) = rest.filter(|rest| rest.is_empty() || rest.starts_with('/')) {
                    let volume = self.root.join(mount["name"].as_str().unwrap());
                    return format!("{}{rest}", volume.display());
                }
            }
            word.to_owned()
        };
        text.split(' ').map(word).collect::<Vec<_>>().join(" ")
    }

    /// The command of a container, which finds the program by its path as in the image.
    fn command(&self, container: &Value) -> Command {
        let words: Vec<_> = ["command", "args"]
            .iter()
            .flat_map(|key| container[key].as_array().unwrap())
            .map(|word| word.as_str().unwrap())
            .collect();
        let programs = program::path().unwrap().parent().unwrap().display().to_string();
        let mut command = Command::new(words[0]);
        command.args(words[1..].iter().map(|word| self.here(container, word)));
        command.env_clear().env("PATH", format!("{programs}:/usr/bin:/bin"));
        for variable in container["env"].as_array().into_iter().flatten() {
            let name = variable["name"].as_str().unwrap();
            let value = match variable["value"].as_str() {
                Some(value) => self.here(container, value),
                None => {
                    let reference = &variable["valueFrom"]["secretKeyRef"];
                    let key = reference["key"].as_str().unwrap();
                    self.secrets[reference["name"].as_str().unwrap()][key].clone()
                }
            };
            command.env(name, value);
        }
        command
    }

    /// Runs a container that ends.
    fn run(&self, container: &Value) {
        let ran = self.command(container).output().unwrap();
        let (said, faults) =
            (String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
        assert!(ran.status.success(), "{}: {said}{faults}", container["name"]);
    }
}

/// A host that runs as its container says. It is killed with this value.
struct Host {
    child: Child,
    container: Value,
    log: PathBuf,
}

impl Host {
    /// Runs the init containers of the pod, then its host.
    fn start(pod: &Pod) -> Self {
        for container in pod.spec["initContainers"].as_array().into_iter().flatten() {
            pod.run(container);
        }
        let container = at(&pod.spec, "containers/oncebox");
        let log = pod.root.join("log");
        let output = fs::File::create(&log).unwrap();
        let mut command = pod.command(&container);
        command.stdin(Stdio::null()).stdout(output.try_clone().unwrap()).stderr(output);
        let child = Child::spawn(command, libc::SIGKILL).unwrap();
        Self { child, container, log }
    }

    fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Requests what a probe requests, from this machine, until the host answers well.
    async fn wait_probe(&self, name: &str) {
        let probe = &self.container[name];
        let get = &probe["httpGet"];
        let scheme = get["scheme"].as_str().unwrap_or("HTTP");
        assert_eq!(scheme, "HTTP", "{name} is no request that this test makes");
        let port = get["port"].as_str().unwrap();
        let port = at(&self.container, &format!("ports/{port}/containerPort")).as_u64().unwrap();
        let address = ("127.0.0.1", u16::try_from(port).unwrap());
        let path = get["path"].as_str().unwrap();
        let limit = Duration::from_secs(probe["timeoutSeconds"].as_u64().unwrap_or(1));
        wait::until(
            DEADLINE,
            Duration::from_millis(100),
            async || {
                anyhow::ensure!(self.child.is_running(), "the host ended: {}", self.log());
                let response = http::get(address, path, limit).await;
                Ok(response.is_some_and(|response| (200..300).contains(&response.status)))
            },
            async || format!("{name} does not succeed: {}", self.log()),
        )
        .await
        .unwrap();
    }

    /// Ends it as a pod is ended.
    fn stop(&self, grace: Duration) {
        self.child.signal(libc::SIGTERM);
        let status = self.child.wait(grace);
        let status = status.unwrap_or_else(|| panic!("runs after its grace: {}", self.log()));
        assert!(status.success(), "{status}: {}", self.log());
        assert!(self.log().contains("drained"), "{}", self.log());
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.child.end(&[(libc::SIGKILL, Duration::from_secs(10))]);
    }
}

/// A certificate for `localhost` and its key, as a Secret of the type `kubernetes.io/tls` has them.
fn certificate(dir: &Path) -> BTreeMap<&'static str, String> {
    fs::create_dir_all(dir).unwrap();
    let made = Command::new("openssl")
        .args(["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"])
        .args(["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"])
        .args(["-keyout", "tls.key", "-out", "tls.crt"])
        .current_dir(dir)
        .output()
        .unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let read = |name: &'static str| (name, fs::read_to_string(dir.join(name)).unwrap());
    BTreeMap::from([read("tls.crt"), read("tls.key")])
}

/// Posts a message to a consumer that is not there, over TLS with a server that has this
/// certificate. Returns the first line of the answer.
fn post_message(port: u16, certificate: &Path) -> String {
    let mut builder = SslConnector::builder(SslMethod::tls_client()).unwrap();
    builder.set_ca_file(certificate).unwrap();
    let stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    let mut stream = builder.build().connect("localhost", stream).unwrap();
    let request = "POST /in/acme/hooks HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n[]";
    stream.write_all(request.as_bytes()).unwrap();
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).unwrap();
    line.trim_end().to_owned()
}

/// Runs the Job, then the pod of the Deployment until each probe has succeeded, does something with
/// the host, and ends it.
async fn check(
    values: &Value,
    further: Secrets,
    root: &Path,
    with_host: impl AsyncFnOnce(&Host, &Pod),
) {
    let database = format!("chart_{}_{:08x}", std::process::id(), rand::random::<u32>());
    let url = with_database(&admin_url().unwrap(), &database).unwrap();
    let kafka = KafkaServer::shared().unwrap();
    let mut secrets = further;
    secrets.insert("oncebox-database", BTreeMap::from([("url", url)]));
    secrets.insert("oncebox-key", BTreeMap::from([("key", MasterKey::generate())]));
    // Ports of this test alone; everything else is as the chart has it.
    let mut all = json!({
        "kafka": { "brokers": kafka.bootstrap() },
        "http": { "port": free_port().unwrap() },
        "api": { "port": free_port().unwrap() },
        "ingress": { "port": free_port().unwrap() },
    });
    merge(&mut all, values);
    let manifests = render(&all).unwrap();

    let job = Pod::prepare(&manifests, "Job", &secrets, root);
    job.run(&at(&job.spec, "containers/migrate"));
    let pod = Pod::prepare(&manifests, "Deployment", &secrets, root);
    let host = Host::start(&pod);
    for probe in ["startupProbe", "livenessProbe", "readinessProbe"] {
        host.wait_probe(probe).await;
    }
    with_host(&host, &pod).await;
    let grace = pod.spec["terminationGracePeriodSeconds"].as_u64().unwrap();
    host.stop(Duration::from_secs(grace));
    drop_database(&database).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_pod_of_the_default_values_runs() {
    let folder = TempDir::new("chart-pod");
    check(&json!({}), Secrets::new(), folder.path(), async |_, _| {}).await;
}

/// The init container joins the files. The API is there for a client that trusts the Secret's
/// certificate, with a token made in the pod as the chart's notes say. A sender that trusts the other
/// Secret's certificate is answered at the other port.
#[tokio::test(flavor = "multi_thread")]
async fn the_pod_with_everything_runs() {
    let folder = TempDir::new("chart-everything");
    let of_api = certificate(&folder.path().join("api-certificate"));
    let of_ingress = certificate(&folder.path().join("ingress-certificate"));
    let secret = |key: &'static str, content: &str| BTreeMap::from([(key, content.to_owned())]);
    let secrets = Secrets::from([
        ("oncebox-old-key", secret("key", &MasterKey::generate())),
        ("kafka-properties", secret("properties", "\"session.timeout.ms\" = \"9000\"\n")),
        ("api-tls", of_api),
        ("ingress-tls", of_ingress),
        ("registry", secret("password", "not used")),
        ("database-ca", secret("ca.crt", "not used")),
    ]);
    check(&everything(), secrets, folder.path(), async |host: &Host, pod: &Pod| {
        let joined = fs::read_to_string(pod.root.join("run/oncebox.toml")).unwrap();
        assert!(joined.ends_with("\"session.timeout.ms\" = \"9000\"\n"), "{joined}");

        let mut exec = host.container.clone();
        exec["args"] = json!(["token", "create", "admin", "--role", "admin"]);
        let token = pod.command(&exec).output().unwrap();
        assert!(token.status.success(), "{}", String::from_utf8_lossy(&token.stderr));
        let token = String::from_utf8(token.stdout).unwrap();
        let port = at(&host.container, "ports/api/containerPort");
        let mut client = Command::new(program::path().unwrap());
        let server = format!("https://localhost:{port}");
        client.args(["tenant", "list", "--json", "--server", &server, "--ca-file"]);
        client.arg(pod.root.join("tls/tls.crt"));
        let listed = client.env_clear().env("ONCEBOX_TOKEN", token.trim()).output().unwrap();
        assert!(listed.status.success(), "{}", String::from_utf8_lossy(&listed.stderr));
        assert_eq!(serde_json::from_slice::<Value>(&listed.stdout).unwrap(), json!([]));

        let port = at(&host.container, "ports/ingress/containerPort").as_u64().unwrap();
        let port = u16::try_from(port).unwrap();
        let answer = post_message(port, &pod.root.join("ingress-tls/tls.crt"));
        assert_eq!(answer, "HTTP/1.1 401 Unauthorized", "{}", host.log());
    })
    .await;
}
