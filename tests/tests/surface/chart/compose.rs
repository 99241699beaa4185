//! packaging/compose/compose.yaml, as Docker Compose reads it. What could go wrong: another machine
//! reaches a service, a start goes on without a secret, the host is killed while it drains, or the
//! files are for another version than the program.

use std::process::{Command, Output};

use serde_json::{Value, json};

use super::{CHECK, field, project, render};

const SECRETS: [&str; 2] = ["POSTGRES_PASSWORD", "ONCEBOX_MASTER_KEY"];

/// Reads the file with these variables of the environment.
fn load(variables: &[&str]) -> Output {
    let mut command = Command::new(&*CHECK);
    for secret in SECRETS {
        command.env_remove(secret);
    }
    let file = project().join("packaging/compose/compose.yaml");
    command.envs(variables.iter().map(|name| (*name, "0123abcd")));
    command.arg("--compose").arg(file).output().unwrap()
}

fn loaded() -> Value {
    let output = load(&SECRETS);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn a_compose_file_without_its_secrets_is_refused() {
    for missing in SECRETS {
        let given: Vec<_> = SECRETS.into_iter().filter(|name| *name != missing).collect();
        let output = load(&given);
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success(), "starts without {missing}");
        assert!(error.contains(&format!("required variable {missing} is missing")), "{error}");
    }
}

#[test]
fn services_are_reached_from_this_machine_alone() {
    let services = loaded()["services"].clone();
    let services = services.as_object().unwrap();
    assert_eq!(services.keys().collect::<Vec<_>>(), ["kafka", "oncebox", "postgres"]);
    for (name, service) in services {
        let ports = service["ports"].as_array().unwrap();
        assert!(!ports.is_empty(), "{name}");
        for port in ports {
            assert_eq!(port["host_ip"], json!("127.0.0.1"), "{name}: {port}");
        }
        assert!(service["healthcheck"]["test"].is_array(), "{name} has no health check");
        assert_ne!(service["privileged"], json!(true), "{name}");
    }
}

#[test]
fn the_host_has_what_it_needs_and_no_more() {
    let services = loaded()["services"].clone();
    let host = &services["oncebox"];
    assert_eq!(host["command"], json!(["oncebox", "serve"]));
    assert_eq!(host["read_only"], json!(true));
    assert_eq!(host["cap_drop"], json!(["ALL"]));
    for needed in ["kafka", "postgres"] {
        assert_eq!(host["depends_on"][needed]["condition"], json!("service_healthy"), "{needed}");
    }
    // The brokers as the host reaches them are an address that Kafka says is its own.
    let brokers = host["environment"]["ONCEBOX_KAFKA_BROKERS"].as_str().unwrap();
    let advertised = services["kafka"]["environment"]["KAFKA_ADVERTISED_LISTENERS"].as_str();
    let advertised: Vec<_> = advertised.unwrap().split(',').collect();
    assert!(advertised.contains(&format!("INSIDE://{brokers}").as_str()), "{advertised:?}");
    // As long as the chart's, which is longer than the same drain.
    let chart = render(&json!({})).unwrap();
    let grace = field(&chart, "POD/terminationGracePeriodSeconds");
    assert_eq!(host["stop_grace_period"], json!(format!("{grace}s")));
}

#[test]
fn the_chart_and_the_image_are_for_this_version() {
    let version = env!("CARGO_PKG_VERSION");
    let image = json!(format!("oncebox:{version}"));
    assert_eq!(loaded()["services"]["oncebox"]["image"], image);
    let chart = render(&json!({})).unwrap();
    let image = json!(format!("registry.example/oncebox:{version}"));
    assert_eq!(field(&chart, "HOST/image"), image);
}
