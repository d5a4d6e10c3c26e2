"""Refusals that only a change of the configuration ends, in one line for whoever can make it. Pure
but for gRPC's names."""

from __future__ import annotations

from control_plane.etcd.failures import Failure
from core.config import ControlPlaneConfig


def slip_line(
    failure: Failure, words: str, *, endpoint: str, password_from: str, config: ControlPlaneConfig
) -> str | None:
    """Return what to change; None: waiting may help.

    Args:
        words: gRPC's and etcd's, from `failures.describe`.
        password_from: where the password was read from, empty without one.
    """
    match failure:
        case Failure.BAD_USER:
            if not config.etcd_user:
                return (
                    f"control_plane.etcd_user = '': etcd at {endpoint} wants a user and a password"
                )
            return (
                f"control_plane.etcd_user = {config.etcd_user!r}: etcd at {endpoint} does not take "
                f"this user with the password from {password_from}"
            )
        case Failure.NO_PERMISSION:
            return (
                f"control_plane.etcd_user = {config.etcd_user!r}: lacks permission in etcd at "
                f"{endpoint}: grant it read and write on the prefix /dovetail/{config.cluster}/"
            )
        case Failure.BAD_CERTIFICATE:
            return _certificate_line(words, endpoint, config)
        case _:
            return None


def _certificate_line(words: str, endpoint: str, config: ControlPlaneConfig) -> str:
    if "ALERT" in words:  # the other side's
        return (
            f"control_plane.etcd_cert_file = {config.etcd_cert_file!r}: "
            f"etcd at {endpoint} wants a client's certificate of another CA"
            if config.etcd_cert_file
            else f"control_plane.etcd_cert_file = '': etcd at {endpoint} wants a client's "
            "certificate"
        )
    if "Hostname" in words:
        return f"control_plane.etcd: the certificate of etcd at {endpoint} is for another host name"
    if config.etcd_ca_file:
        return (
            f"control_plane.etcd_ca_file = {config.etcd_ca_file!r}: did not sign the certificate "
            f"of etcd at {endpoint}"
        )
    return (
        f"control_plane.etcd_ca_file = '': no CA that this machine knows signed the certificate of "
        f"etcd at {endpoint}: name its CA"
    )
