"""Tests of the gateway, against a log in memory and a scripted conductor and worker."""
